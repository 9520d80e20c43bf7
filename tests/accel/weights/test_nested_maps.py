"""Device maps whose entries lie within one another: the longest name that fits holds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import dispatch_model
from accel.utils.modeling import get_state_dict_offloaded_model


class Part(nn.Module):
    """Uses a weight of its own and those of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs * self.scale


class Attention(nn.MultiheadAttention):
    """Attends to its own inputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # one input
        return super().forward(inputs, inputs, inputs)[0]


def made(part: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(part, nn.Linear(4, 4)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


class Direct(nn.Module):
    """Uses the weights of a submodule without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.inner.weight
        return nn.functional.linear(inputs, weight, self.inner.bias) * self.scale


@pytest.mark.parametrize("preload", [["Part"], None])
@pytest.mark.parametrize(
    ("part", "where"),
    [
        (Part(), {"": "disk", "0.inner": "cpu"}),
        (Part(), {"": "cpu", "0": "disk", "0.inner": "disk", "0.inner.1": "cpu"}),
        (Part(), {"": "disk", "0.inner": "cpu", "0.inner.1": "disk"}),
        (Part(), {"": "disk", "0.inner": "disk"}),
        (Part(), {"0": "cpu", "0.inner": "disk", "1": "cpu"}),
        (Part(), {"": "disk", "0.inner": "cpu", "0.inner.1": "disk", "0.inner.1.bias": "cpu"}),
        (Attention(4, 2), {"": "disk", "0.out_proj": "cpu"}),
        (Attention(4, 2), {"": "disk", "0.out_proj": "disk"}),
        (Attention(4, 2), {"": "cpu", "0": "disk", "0.out_proj": "disk"}),
        (Attention(4, 2), {"": "cpu", "0": "disk", "0.in_proj_weight": "cpu"}),
    ],
)
def test_the_longest_name_that_fits_holds(
    part: nn.Module, where: dict[str, Any], preload: Any, tmp_path: Path
) -> None:
    plain, inputs = made(copy.deepcopy(part)), torch.randn(3, 4)
    model = dispatch_model(
        copy.deepcopy(plain), where, "cpu", offload_dir=tmp_path, preload_module_classes=preload
    )
    for _ in range(2):
        assert torch.equal(model(inputs), plain(inputs))
    found = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    longest = {
        name: max((one for one in where if not one or f"{name}.".startswith(f"{one}.")), key=len)
        for name in plain.state_dict()
    }
    assert found == {name for name, one in longest.items() if where[one] == "disk"}
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    "where",
    [{"": "disk", "0.inner": "disk"}, {"": "cpu", "0": "disk", "0.inner": "disk"},
     {"": "disk", "0.inner.weight": "cpu"}, {"": "disk", "0.inner": "cpu", "0.inner.bias": "disk"}],
)  # fmt: skip
def test_a_module_that_loads_all_within_has_it(where: dict[str, Any], tmp_path: Path) -> None:
    plain, inputs = made(Direct()), torch.randn(3, 4)
    model = dispatch_model(
        copy.deepcopy(plain), where, "cpu", offload_dir=tmp_path, preload_module_classes=["Direct"]
    )
    for _ in range(2):
        assert torch.equal(model(inputs), plain(inputs))
