"""Exports: sizes, shards and their index, single objects (E1)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel.checkpoint import export
from accel.checkpoint.serialization import read_tensors
from accel.machine.errors import CheckpointError, ConfigError
from accel.weights.load import load_checkpoint_in_model
from tests.accel.checkpoint.parts import names


def state() -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.randn(10, 10) for i in range(5)}  # 400 bytes each


@pytest.mark.parametrize(
    ("size", "expected"),
    [(7, 7), ("123", 123), ("5MB", 5_000_000), ("1.5 KiB", 1536), ("10GB", 10**10)],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert export.parse_size(size) == expected


@pytest.mark.parametrize("size", ["big", "5XB", "-1GB", "0", ""])
def test_sizes_that_are_none_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        export.parse_size(size)


@pytest.mark.parametrize("safe", [True, False])
def test_shards_are_listed_in_an_index(tmp_path: Path, safe: bool) -> None:
    tensors = state()
    export.export_model(tensors, tmp_path, max_shard_size=900, safe=safe)
    base, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((tmp_path / f"{base}.{suffix}.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert set(index["weight_map"].values()) == {
        f"{base}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)
    }
    for name, file in index["weight_map"].items():
        path = tmp_path / file
        part = load_file(path) if safe else torch.load(path, weights_only=True)
        assert torch.equal(part[name], tensors[name])


def test_an_export_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    export.export_model(state(), tmp_path, max_shard_size=900)
    export.export_model(state(), tmp_path)
    assert names(tmp_path) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("sizes", [(900, 900), (900, 400), (900, "1GB"), ("1GB", 900)])
@pytest.mark.parametrize("fails", ["writing", "renaming"])
def test_an_export_that_is_cut_off_is_never_mixed_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[Any, Any], fails: str
) -> None:
    ones = {name: torch.ones(10, 10) for name in state()}
    export.export_model(ones, tmp_path, max_shard_size=sizes[0])
    module, function = (export, "write_tensors") if fails == "writing" else (os, "replace")
    done, real = [], getattr(module, function)

    def cut_off(*args: Any) -> None:
        if len(done) == (0 if sizes[1] == "1GB" else 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)
        done.append(args)

    monkeypatch.setattr(module, function, cut_off)
    with pytest.raises(OSError, match="No space"):
        export.export_model({n: 2 * w for n, w in ones.items()}, tmp_path, max_shard_size=sizes[1])
    monkeypatch.undo()
    assert not [path for path in names(tmp_path) if "partial" in path]
    model = nn.ModuleDict({f"layer{i}": nn.Linear(10, 10, bias=False) for i in range(5)})
    try:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    except CheckpointError:
        assert fails == "renaming"
    else:
        assert all(torch.equal(weight, ones["layer0.weight"]) for weight in model.parameters())


def test_values_that_are_no_tensors_want_the_other_format(tmp_path: Path) -> None:
    mixed = {"weight": torch.ones(2), "_extra_state": {"seen": 1}}
    with pytest.raises(CheckpointError, match="_extra_state"):
        export.export_model(mixed, tmp_path)
    export.export_model(mixed, tmp_path, safe=False)
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found["_extra_state"] == {"seen": 1}


def test_saving_shared_tensors_warns_of_the_names_that_are_left_out(tmp_path: Path) -> None:
    """E1."""
    weight = torch.ones(2)
    with pytest.warns(UserWarning, match=r"Removed shared tensor \['b'\] while saving"):
        export.save(
            {"a": weight, "b": weight}, tmp_path / "one.safetensors", safe_serialization=True
        )
    assert read_tensors(tmp_path / "one.safetensors").keys() == {"a", "b"}
