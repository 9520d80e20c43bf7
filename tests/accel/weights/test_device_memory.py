"""Memory of the devices that a model may be spread over."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from accel.utils import get_balanced_memory, get_max_memory
from accel.weights import device_map
from tests.accel.weights.models import net

LAYER = 440  # bytes of Linear(10, 10)
ROOM = {0: 3000, 1: 3000, "cpu": 10_000}


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)])


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


def test_texts_become_bytes_where_they_were_given() -> None:
    """As transformers counts with what it hands in."""
    given: dict[int | str, float | str] = {"cpu": "10MB", "disk": 5.5}
    get_max_memory(given)
    assert given == {"cpu": 10_000_000, "disk": 5.5}
    get_max_memory(MappingProxyType({"cpu": "10MB"}))
    refused: dict[int | str, float | str] = {"cpu": "10MB", "gpu": "1MB"}
    with pytest.raises(ConfigError):
        get_max_memory(refused)
    assert refused == {"cpu": "10MB", "gpu": "1MB"}


def test_a_container_has_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_map, "_CGROUP", tmp_path)
    assert get_max_memory()["cpu"] > 700
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert get_max_memory()["cpu"] == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert get_max_memory()["cpu"] > 700


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
