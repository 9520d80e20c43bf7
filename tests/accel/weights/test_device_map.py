"""Device maps: inferred, checked, shortened."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from accel.utils import check_device_map, infer_auto_device_map
from accel.utils.modeling import clean_device_map, compute_module_sizes
from tests.accel.weights.models import Tied, net

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


def test_entries_of_one_device_become_one() -> None:
    devices: dict[str, int | str | torch.device] = {"a.b": 0, "a.c": 0, "d": 1}
    assert clean_device_map(devices) == {"a": 0, "d": 1}
    assert clean_device_map({"a": 0, "b": 0, "b.c": 0}) == {"": 0}
    apart = {"l.1.a": 0, "l.10.a": 1, "l.10.b": 0, "l.1.b": 0}
    assert clean_device_map(dict(apart)) == {"l.1": 0, "l.10.a": 1, "l.10.b": 0}
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1}, "a") == {
        "b.x": 1,
        "b.y": 1,
        "a": 0,
    }
