"""E1, E4: device maps follow the memory of each device, and every tensor goes where they say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel import (
    Accelerator,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.machine.errors import ConfigError
from accel.utils import check_device_map, get_balanced_memory, get_max_memory
from accel.utils.modeling import compute_module_sizes, get_state_dict_offloaded_model
from accel.weights.device_map import Filler, lies_in
from accel.weights.sizes import own_parts
from accel.weights.tensors import find_tied_parameters
from tests.accel.weights.models import Tied, inputs, net, on_meta

LAYER = 440


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)])


def test_devices_are_filled_in_order() -> None:
    found = infer_auto_device_map(layers(), {0: 1000, 1: 1000, "cpu": 10_000})
    assert found == {"0": 0, "1": 1, "2": 1, "3": "cpu", "4": "cpu", "5": "cpu"}
    found = infer_auto_device_map(layers(), {0: 1000, "cpu": 900})
    assert found == {"0": 0, "1": "cpu"} | dict.fromkeys("2345", "disk")
    assert infer_auto_device_map(layers(), {0: 6 * LAYER}) == {"": 0}
    assert infer_auto_device_map(layers()) != {}


def test_blocks_are_not_split() -> None:
    model = net()
    room = {0: 300, "cpu": 10_000}
    assert "1.linear" in infer_auto_device_map(model, room)
    for classes in (["Block"], "Block"):
        found = infer_auto_device_map(model, room, no_split_module_classes=classes)
        assert set(found) <= {"", "0", "1"}


def test_a_dtype_lets_more_fit() -> None:
    room = {0: 1000, "cpu": 10_000}
    half = infer_auto_device_map(layers(), room, dtype=torch.float16)
    assert [name for name in half if half[name] == 0] == ["0", "1", "2"]
    special = {"1.weight": torch.float32}
    found = infer_auto_device_map(layers(), room, dtype=torch.float16, special_dtypes=special)
    assert [name for name in found if found[name] == 0] == ["0", "1"]


def test_decisions_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(layers(), {"cpu": 10_000})
        assert caplog.text == ""
        infer_auto_device_map(layers(), {"cpu": 10_000}, verbose=True)
    assert "Putting ['0'] (size=440) on cpu." in caplog.text


def test_entries_stay_apart_on_request() -> None:
    found = infer_auto_device_map(layers(), {"cpu": 10_000}, clean_result=False)
    assert found == dict.fromkeys("012345", "cpu")


def test_buffers_of_offloaded_modules_need_room() -> None:
    """E1: a warning, which users filter."""
    room = {0: 10, "cpu": 10_000}
    infer_auto_device_map(net(), room, ["Block"], offload_buffers=True)
    with pytest.warns(UserWarning, match="consider using offload_buffers=True"):
        infer_auto_device_map(net(), room, ["Block"])


def test_a_later_module_is_tried_on_request() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Sequential(nn.Linear(30, 30), nn.Linear(2, 2)))
    room = {0: 100, 1: 100, "cpu": 10_000}
    assert infer_auto_device_map(model, room) == {"": "cpu"}
    found = infer_auto_device_map(model, room, fallback_allocation=True)
    assert found == {"1.1": 1, "0": "cpu", "1.0": "cpu"}


def test_tied_weights_go_to_one_device() -> None:
    model = Tied()
    sizes = compute_module_sizes(model)
    room = {0: sizes["embedding"] + 80, "cpu": 10_000}
    found = infer_auto_device_map(model, room)
    assert found["embedding"] == found["head"] == 0
    assert "block" in found or "block.linear" in found


def test_every_weight_needs_a_device() -> None:
    model = net()
    check_device_map(model, {"": "cpu"})
    check_device_map(model, {"0": 0, "1": "disk", "1.shift": 0})
    with pytest.raises(ConfigError, match=r"any device for the following parameters: 1\.scale"):
        check_device_map(model, {"0": 0, "1.norm": 0, "1.linear": 0})
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['2'\]"):
        check_device_map(model, {"": "cpu", "2": 0})


ROOM = {0: 3000, 1: 3000, "cpu": 10_000}


def test_free_memory_is_found() -> None:
    found = get_max_memory()
    assert list(found)[-1] == "cpu"
    assert 2**20 < found["cpu"] < 2**50


def test_given_memory_is_put_in_order(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = get_max_memory({"disk": 5, "cpu": "10MB", 101: 5.0, 100: 3})
    assert list(found.items()) == [(100, 3), (101, 5), ("cpu", 10_000_000), ("disk", 5)]
    assert "Device 100 is not available" in caplog.text
    with pytest.raises(ConfigError, match="Device gpu is not recognized"):
        get_max_memory({"gpu": 1})


def test_layers_are_balanced() -> None:
    each = 6 * LAYER // 2 + LAYER * 5 // 4
    assert get_balanced_memory(layers(), ROOM) == {**ROOM, 0: each}
    assert get_balanced_memory(layers(), {"cpu": 7}) == {"cpu": 7}
    assert get_balanced_memory(layers(), {0: 100, 1: 100, "cpu": 7})[0] == 100
    one = get_balanced_memory(layers(), {0: 3000, "cpu": 7})
    assert one == {0: 3000, "cpu": 7}


def test_blocks_need_more_room_than_layers() -> None:
    model = net()
    alone = get_balanced_memory(model, ROOM)
    blocks = get_balanced_memory(model, ROOM, no_split_module_classes=["Block"])
    assert blocks[0] > alone[0]
    assert blocks == get_balanced_memory(model, ROOM, "Block")


def test_a_dtype_balances_fewer_bytes() -> None:
    full, half = (get_balanced_memory(layers(), ROOM, dtype=d)[0] for d in (None, torch.float16))
    assert half * 2 == full
    special = dict.fromkeys((f"{n}.weight" for n in range(6)), torch.float32)
    more = get_balanced_memory(layers(), ROOM, dtype=torch.float16, special_dtypes=special)
    assert half < more[0] < full


def test_the_first_device_may_get_little() -> None:
    assert get_balanced_memory(layers(), ROOM, low_zero=True)[0] == 0
    tight = {0: 3000, 1: 1000, "cpu": 10_000}
    assert get_balanced_memory(layers(), tight, low_zero=True)[0] == 6 * LAYER - 1000


@given(st.lists(st.integers(0, 800), max_size=3), st.integers(0, 800), st.booleans())
def test_every_tensor_has_a_device_that_has_room(
    accelerators: list[int], memory: int, fallback: bool
) -> None:
    model = nn.Sequential(Tied(), Tied())
    sizes = compute_module_sizes(model)
    limits = {**dict(enumerate(accelerators)), "cpu": memory}
    filler = Filler(limits, sizes, find_tied_parameters(model), frozenset(["Block"]), fallback)
    placed = filler.fill(own_parts(model))
    for name in (*model.state_dict(), "0.block.shift"):
        assert [lies_in(name, part) for part in placed].count(True) == 1
    for device, limit in limits.items():
        held = [sizes.get(name, 0) for name, where in placed.items() if where == device]
        assert sum(held) == filler.used.get(device, 0) <= limit


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
