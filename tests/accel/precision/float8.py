"""What the tests of fp8 share: a model, and the same training by hand, with torchao alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.imports import is_torchao_available
from accel.utils import AORecipeKwargs, FullyShardedDataParallelPlugin

needs_torchao = pytest.mark.skipif(
    not is_torchao_available(), reason="torchao is not installed (extra `fp8`)"
)
CONVERTED = ("inside.0", "inside.2")
DIM = 32


class Net(torch.nn.Module):
    """[B, 32] to [B, 32]; its first and last linear layers are not those that fp8 is for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(DIM, DIM)
        self.norm = torch.nn.LayerNorm(DIM)
        self.inside = torch.nn.Sequential(
            torch.nn.Linear(DIM, 2 * DIM), torch.nn.GELU(), torch.nn.Linear(2 * DIM, DIM)
        )
        self.last = torch.nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(x + self.inside(x))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(rank: int, num: int = 4) -> list[torch.Tensor]:
    """Return batches [16, 32] of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, DIM, generator=generator) for _ in range(num)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    recipe: dict[str, Any] | None,
    fsdp: dict[str, Any] | None = None,
    folder: str | None = None,
    **arguments: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of this rank and the weights; save the state in `folder`.

    `recipe` has the fields of `AORecipeKwargs`; None: the run computes in fp32.
    """
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if recipe is None else "fp8",
        kwargs_handlers=None if recipe is None else [AORecipeKwargs(**recipe)],
        fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
        **arguments,
    )
    model = network()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses = []
    for batch in batches(accelerator.process_index):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    if folder is not None:
        accelerator.save_state(f"{folder}/state")
    accelerator.end_training()
    return losses, weights


def resume(
    folder: str, recipe: dict[str, Any] | None, fsdp: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of a run that loads the state in `folder`, after a pass through it."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if recipe is None else "fp8",
        kwargs_handlers=None if recipe is None else [AORecipeKwargs(**recipe)],
        fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
    )
    model = Net()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    model(batches(0, 1)[0])  # weights that were gathered, and their scales, are the old ones'
    accelerator.load_state(f"{folder}/state")
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    weights["answer"] = model(batches(0, 1)[0]).detach()
    accelerator.end_training()
    return weights


def by_hand(config: str, names: tuple[str, ...] = CONVERTED, world_size: int = 1) -> Any:
    """Return the losses (of rank 0) and weights of the same training with torchao and torch alone.

    With several ranks, the gradients of their batches are averaged, as DDP does.
    """
    from accel.precision.fp8 import import_torchao

    float8 = import_torchao()
    recipe = float8.Float8LinearConfig.from_recipe_name(config)
    model = network()
    float8.convert_to_float8_training(
        model,
        config=dataclasses.replace(recipe, emulate=True),
        module_filter_fn=lambda module, name: name in names,
    )
    for name in names:  # what torchao's layer does under the autocast of CUDA
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    optimizer, losses = optimizer_of(model), []
    for window in zip(*(batches(rank) for rank in range(world_size)), strict=True):
        for rank, batch in enumerate(window):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(batch)
            loss = outputs.float().square().mean()
            (loss / world_size).backward()
            if rank == 0:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()
