"""One small language model, trained by a plain loop and by an `Accelerator`: they must agree."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin

VOCABULARY, WIDTH, LENGTH = 12, 8, 4
BATCH, STEPS = 8, 10
CLOSE = 1e-5
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(torch.nn.Module):
    """A residual MLP of odd width, so that shards are uneven."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


class Model(torch.nn.Module):
    """Tied embedding, two blocks, one frozen parameter, one buffer."""

    _no_split_modules = ("Block", "NotInThisOne")
    _tp_plan = PLAN

    def __init__(self, hidden: int = 20, frozen: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(hidden), Block(hidden)])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.shift = torch.nn.Parameter(torch.full((5,), 0.1), requires_grad=not frozen)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale + self.shift.sum()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def data(steps: int = STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH * steps, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return TensorDataset(tokens, torch.roll(tokens, -1, dims=1))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def plain(
    model: torch.nn.Module, accumulation: int = 1, max_norm: float = 0.5
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train without accel; return losses, norms before clipping, and weights."""
    optimizer = adamw(model)
    losses, norms = [], []
    for index, (tokens, targets) in enumerate(DataLoader(data(), BATCH)):
        loss = loss_of(model, tokens, targets)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (index + 1) % accumulation == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
    return (
        losses,
        norms,
        {name: value.detach().clone() for name, value in model.state_dict().items()},
    )


def build(
    fsdp: dict[str, Any] | None = None, tp: dict[str, Any] | None = None, **arguments: Any
) -> Accelerator:
    if fsdp is not None:
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(**fsdp)
    if tp is not None:
        arguments["torch_tp_plugin"] = TorchTensorParallelPlugin(**tp)
    return Accelerator(cpu=True, split_batches=True, **arguments)


def steps_of(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    loader: Any,
    max_norm: float = 0.5,
) -> tuple[list[float], list[float]]:
    """Train over the loader once; return the losses over all data, and the norms."""
    losses, norms = [], []
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        # Ranks that split one replica have the same loss, so it counts alike.
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def train(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Do what `plain` does."""
    optimizer = adamw(model) if optimizer is None else optimizer
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), BATCH))
    losses, norms = steps_of(accelerator, model, optimizer, loader)
    return losses, norms, accelerator.get_state_dict(model)


def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def largest(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second)
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def assert_as_plain(
    accelerator: Accelerator,
    model: torch.nn.Module,
    reference: torch.nn.Module,
    accumulation: int = 1,
    optimizer: Any = None,
    case: object = None,
) -> None:
    """Train a model, and another alike in a plain loop: losses, norms and weights agree."""
    losses, norms, weights = train(accelerator, model, optimizer)
    expected = plain(reference, accumulation)
    assert largest(losses, expected[0]) < CLOSE, case
    assert largest(norms, expected[1]) < CLOSE, case
    assert difference(weights, expected[2]) < CLOSE, case


def local_sizes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes that this rank holds."""
    return {
        name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
        for name, p in model.named_parameters()
    }
