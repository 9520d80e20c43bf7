"""Weights of a checkpoint that stay on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from accel.utils import OffloadedWeightsLoader
from accel.weights.folder import DiskWeights


def test_a_weight_is_written_unless_its_file_will_do(tmp_path: Path) -> None:
    stored = {name: (tmp_path / "x.safetensors", name) for name in ("a", "b")}
    disk = DiskWeights(tmp_path / "off", stored)
    for name, dtype in (("a", torch.float32), ("b", torch.float16), ("c", torch.float32)):
        disk.add(name, torch.ones(2), dtype, name)
    disk.save(["a", "b", "c"])
    index = json.loads((tmp_path / "off" / "index.json").read_text())
    assert index["a"]["safetensors_file"] == str(tmp_path / "x.safetensors")
    assert sorted(path.name for path in (tmp_path / "off").iterdir()) == [
        *("b.dat", "c.dat", "index.json")
    ]
    assert OffloadedWeightsLoader(save_folder=tmp_path / "off")["b"].dtype == torch.float16


def test_tied_weights_are_listed_under_each_name(tmp_path: Path) -> None:
    disk = DiskWeights(tmp_path, {"a": (tmp_path / "x.safetensors", "a")})
    for name in ("a", "b"):
        disk.add(name, torch.ones(2), torch.float32, "a")
    assert disk.index["a"] == disk.index["b"]
    assert list(tmp_path.glob("*.dat")) == []
