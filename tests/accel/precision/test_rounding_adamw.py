"""AdamW on weights in bf16: moments that fall, bits that resume, draws of shards and replicas.

Holds E3.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.machine.errors import StateError
from accel.machine.memory import local
from accel.precision.rounding_adamw import RoundingAdamW
from accel.utils import set_seed
from tests.helpers import run_distributed

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def gradients(num_steps: int, large: int, size: int = 8) -> list[torch.Tensor]:
    """Return gradients that are 100 times smaller after the first ones; exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(num_steps):
        values = torch.randn(size, size, generator=generator).bfloat16()
        found.append(values.float() * (1 if step < large else 2.0**-7))
    return found


def step(optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient.to(parameter.dtype).expand_as(parameter).clone()
    optimizer.step()


# -- numbers -----------------------------------------------------------------------------------


def test_moments_are_those_of_weights_in_fp32() -> None:
    """In bf16 the second one would rise, and stay there."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(8, 8))
    mine, wanted = RoundingAdamW([weight], **OPTIONS), torch.optim.AdamW([exact], **OPTIONS)
    risen = torch.zeros(8, 8)
    for number, gradient in enumerate(gradients(600, large=20)):
        step(mine, gradient)
        step(wanted, gradient)
        if number == 19:
            risen = mine.state[weight]["exp_avg_sq"].clone()
    for name in ("exp_avg", "exp_avg_sq"):
        assert mine.state[weight][name].dtype == torch.float32
        assert torch.equal(mine.state[weight][name], wanted.state[exact][name])
    assert (mine.state[weight]["exp_avg_sq"] < 0.6 * risen).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_weights_in_fp32_are_stepped_as_by_torch(fused: bool, amsgrad: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    options = {**OPTIONS, "amsgrad": amsgrad, "fused": fused}
    mine, wanted = RoundingAdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for gradient in gradients(20, large=10):
        step(mine, gradient)
        step(wanted, gradient)
    assert torch.equal(ours, theirs)


# -- several processes -------------------------------------------------------------------------


def network() -> torch.nn.Module:
    layers = [torch.nn.Linear(16, 16, bias=False), torch.nn.LayerNorm(16)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 16, bias=False)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    return model


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank holds, by name."""
    held = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
    return {name.removeprefix("module."): weight for name, weight in held.items()}


def run(kind: str, folder: str) -> dict[str, Any]:
    """Train three steps and three more, and the latter again after a restore.

    The gradients of all elements are alike, so that elements differ by their rounding alone.
    """
    given: dict[str, Any] = {}
    if kind == "fsdp":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    if kind == "tp":
        plan = {"0": "colwise", "2": "rowwise"}
        given["torch_tp_plugin"] = TorchTensorParallelPlugin(tp_size=2, tp_plan=plan)

    def prepared() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True, **given)
        set_seed(3, device_specific=True)
        model = network()
        made = RoundingAdamW(model.parameters(), lr=2.0**-10, weight_decay=0.0)
        return accelerator, *accelerator.prepare(model, made)

    def train(optimizer: Any) -> None:
        for _ in range(3):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            with warnings.catch_warnings():  # DDP's: these gradients are of no forward pass
                warnings.simplefilter("ignore")
                optimizer.step()

    accelerator, model, optimizer = prepared()
    train(optimizer)
    accelerator.save_state(f"{folder}/state")
    train(optimizer)
    held = weights(model)
    accelerator.free_memory()
    accelerator, model, optimizer = prepared()
    accelerator.load_state(f"{folder}/state")
    dtypes = {s["exp_avg_sq"].dtype for s in optimizer.state.values()}
    train(optimizer)
    again = weights(model)
    accelerator.end_training()
    return {"held": held, "again": again, "dtypes": dtypes}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_replicas_are_rounded_alike_and_shards_are_not(kind: str, tmp_path: Any) -> None:
    answers = run_distributed(run, 2, kind, str(tmp_path))
    first, second = (answer["held"] for answer in answers)
    assert set(first) == {"0.weight", "1.weight", "1.bias", "2.weight"}
    for name, weight in first.items():
        replicated = kind == "ddp" or (kind == "tp" and name.startswith("1."))
        assert weight.shape == second[name].shape
        assert weight.numel() < 64 or len(set(weight.flatten().tolist())) > 1
        assert torch.equal(weight, second[name]) is replicated, name
    for answer in answers:
        assert answer["dtypes"] == {torch.float32}
        for name, weight in answer["held"].items():
            assert torch.equal(weight, answer["again"][name])


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    table = torch.nn.Embedding(8, 4, sparse=True, dtype=torch.bfloat16)
    optimizer = RoundingAdamW(table.parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(StateError, match=r"sparse gradient \[8, 4\].*sparse=False"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert not optimizer.state
