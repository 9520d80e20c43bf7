"""Optimizer state by name: bit-equal, whatever the order, the wrapper or the optimizer (R5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, state_by_name
from accel.checkpoint.serialization import load_plain, save_plain
from accel.machine.errors import CheckpointError
from accel.precision.rounding_adamw import RoundingAdamW

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


def moved(saved: dict[str, Any], folder: Path) -> Any:
    save_plain(saved, folder / "optimizer.bin", "optimizer 0")
    return load_plain(folder / "optimizer.bin")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_come_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    saved = moved(state_by_name(optimizer, ParameterNames([model])), tmp_path)
    assert set(saved["state"]) == {f"model:{name}" for name, _ in model.named_parameters()}

    fresh = build(1)
    fresh.load_state_dict(model.state_dict())
    restored = OPTIMIZERS[kind](fresh.parameters())
    load_by_name(restored, saved, ParameterNames([fresh]))
    assert same(restored.state_dict(), optimizer.state_dict())
    train(model, optimizer)
    train(fresh, restored)
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_groups_keep_their_settings(tmp_path: Path) -> None:
    def groups(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters()}],
            lr=0.5,
        )

    model = build()
    optimizer = groups(model, 0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    saved = moved(state_by_name(optimizer, ParameterNames([model])), tmp_path)
    restored = groups(model, 0.9)
    load_by_name(restored, saved, ParameterNames([model]))
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.5]
    assert restored.param_groups[0]["initial_lr"] == 0.1


TORCHS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}


# Entries in fp32 whatever the weight is.
EXACT = {"step", "mu_product", "eta", "mu"}


class Scaled(nn.Module):
    """A model with weights of two, one and no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.scale.dtype)) * self.scale


@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_moments_of_torchs_optimizers_take_the_dtype_of_their_weights(
    tmp_path: Path, kind: str, before: torch.dtype, after: torch.dtype
) -> None:
    model, other = Scaled().to(before), Scaled().to(after)
    optimizer, restored = (TORCHS[kind](m.parameters()) for m in (model, other))
    train(model, optimizer)
    saved = moved(state_by_name(optimizer, ParameterNames([model])), tmp_path)
    load_by_name(restored, saved, ParameterNames([other]))
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[old].items():
            expected = value if name in EXACT else value.to(after)
            assert same(restored.state[new][name], expected), name
    train(other, restored)


def test_moments_of_rounding_adamw_stay_in_fp32_and_go_on_in_torchs_adamw(tmp_path: Path) -> None:
    model, other = (build().to(torch.bfloat16) for _ in range(2))
    optimizer = RoundingAdamW(model.parameters())
    in_bf16(model, optimizer)
    saved = moved(state_by_name(optimizer, ParameterNames([model])), tmp_path)
    again = RoundingAdamW(other.parameters())
    load_by_name(again, saved, ParameterNames([other]))
    assert same(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.state[other[0].weight]["exp_avg"].dtype == torch.float32
    torchs = torch.optim.AdamW(other.parameters())
    load_by_name(torchs, saved, ParameterNames([other]))
    in_bf16(other, torchs)


def in_bf16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(5, 4, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()


def test_other_parameters_or_groups_are_refused(tmp_path: Path) -> None:
    model = build()
    names = ParameterNames([model])
    saved = moved(state_by_name(torch.optim.SGD(model.parameters()), names), tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks model:2\.bias, model:2\.weight of the saved"):
        load_by_name(torch.optim.SGD(model[0].parameters()), saved, names)
    two = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    with pytest.raises(CheckpointError, match="2 parameter groups: the saved one has 1"):
        load_by_name(two, saved, names)
    with pytest.raises(CheckpointError, match="format None"):
        load_by_name(two, {"state": {}}, names)
