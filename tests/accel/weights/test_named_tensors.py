"""Device maps with entries of single parameters and buffers, beside those of submodules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import inputs, net, on_meta


class Scaled(nn.Module):
    """A linear layer, and a parameter and a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale + self.get_buffer("shift")
        return out


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled().eval()


def dispatched(
    kind: str, model: nn.Module, empty: nn.Module, device_map: dict[str, Any], folder: Path
) -> nn.Module:
    if kind == "with data":
        return dispatch_model(model, device_map, offload_dir=folder / "off", offload_buffers=True)
    Accelerator(cpu=True).save_model(model, folder / "weights")
    return load_checkpoint_and_dispatch(
        empty,
        folder / "weights",
        device_map=device_map,
        offload_folder=folder / "off",
        offload_buffers=True,
        strict=True,
    )


@pytest.mark.parametrize("kind", ["with data", "from a checkpoint"])
@pytest.mark.parametrize(
    ("device_map", "away"),
    [
        ({"scale": "disk", "": "cpu"}, {"scale"}),
        ({"linear": "cpu", "scale": "disk", "shift": "cpu"}, {"scale"}),
        ({"linear": "cpu", "scale": "cpu", "shift": "disk"}, {"shift"}),
        ({"linear.bias": "disk", "": "cpu"}, {"linear.bias"}),
        ({"linear": "disk", "scale": "disk", "shift": "disk"}, None),
        ({"scale": "cpu", "": "disk"}, {"shift", "linear.weight", "linear.bias"}),
        ({"linear": "disk", "linear.bias": "cpu", "": "cpu"}, {"linear.weight"}),
    ],
)
def test_they_go_where_the_map_says(
    kind: str, device_map: dict[str, Any], away: set[str] | None, tmp_path: Path
) -> None:
    with init_empty_weights(include_buffers=True):
        empty = Scaled().eval()
    model = dispatched(kind, scaled(), empty, device_map, tmp_path)
    for _ in range(2):
        assert torch.equal(model(inputs()), scaled()(inputs()))
    assert on_meta(model) == (set(scaled().state_dict()) if away is None else away)
    found = get_state_dict_offloaded_model(model)
    assert all(torch.equal(found[name], value) for name, value in scaled().state_dict().items())


@pytest.mark.parametrize("kind", ["with data", "from a checkpoint"])
def test_also_within_blocks(kind: str, tmp_path: Path) -> None:
    with init_empty_weights(include_buffers=False):
        empty = net()
    empty[0].shift, empty[1].shift = net()[0].shift, net()[1].shift
    device_map = {"0": "cpu", "0.scale": "disk", "1": "disk", "1.norm.bias": "cpu"}
    model = dispatched(kind, net(), empty, device_map, tmp_path)
    assert torch.equal(model(inputs()), net()(inputs()))
    away = on_meta(model)
    assert "0.scale" in away
    assert "0.norm.bias" not in away
    assert "1.scale" in away
    assert "1.norm.bias" not in away


def test_the_inferred_map_of_a_buffer(tmp_path: Path) -> None:
    with init_empty_weights(include_buffers=True):
        empty = Scaled().eval()
    Accelerator(cpu=True).save_model(scaled(), tmp_path / "weights")
    for limit in range(0, 240, 8):
        device_map = infer_auto_device_map(empty, {"cpu": limit}, offload_buffers=True)
        with init_empty_weights(include_buffers=True):
            model = Scaled().eval()
        load_checkpoint_and_dispatch(
            model, tmp_path / "weights", device_map, offload_folder=tmp_path, offload_buffers=True
        )
        assert torch.equal(model(inputs()), scaled()(inputs())), device_map
