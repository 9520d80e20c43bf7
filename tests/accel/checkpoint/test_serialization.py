"""R4: contents are plain, and nothing in them is executed."""

from __future__ import annotations

import enum
import logging
import pickle
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel.checkpoint import serialization
from accel.machine.errors import CheckpointError


class Color(enum.Enum):
    RED = 1


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return logging.error, ("code ran",)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def round_trip(value: Any, folder: Path) -> Any:
    serialization.save_plain(value, folder / "value.bin", "value")
    return serialization.load_plain(folder / "value.bin")


# -- plain values --------------------------------------------------------------------------


def test_plain_values_come_back_as_they_are(tmp_path: Path) -> None:
    value = {
        "step": 3,
        "rates": [0.1, (1, None, True)],
        "milestones": Counter({30: 1}),
        "ordered": OrderedDict(a=b"bytes", z={1, 2}),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }
    assert round_trip(value, tmp_path) == value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"fn": lambda step: step}, r"scheduler 0\['fn'\] is a builtins\.function"),
        ({"a": [1, {"kind": Color.RED}]}, r"scheduler 0\['a'\]\[1\]\['kind'\].*Color"),
        ({"h": np.array([object()])}, r"scheduler 0\['h'\] is a numpy\.ndarray"),
        ({"h": np.ma.masked_equal([1, 2], 1)}, r"scheduler 0\['h'\] is a numpy\.ma"),
        ({Fraction(1, 2): 1}, "the key .*Fraction"),  # megatron-core lets torch load paths
        ([Evil()], r"scheduler 0\[0\].*Evil"),
    ],
)
def test_what_could_not_be_read_back_is_refused_when_saved(
    tmp_path: Path, value: Any, place: str
) -> None:
    with pytest.raises(CheckpointError, match=place):
        serialization.save_plain(value, tmp_path / "scheduler.bin", "scheduler 0")


def test_a_file_that_would_run_code_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for writer in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        writer(Evil(), tmp_path / "evil.pkl")
        with pytest.raises(CheckpointError, match="could run code"):
            serialization.load_plain(tmp_path / "evil.pkl")
    assert "code ran" not in caplog.text


def test_missing_files_are_named(tmp_path: Path) -> None:
    for read in (serialization.load_plain, serialization.read_tensors):
        with pytest.raises(CheckpointError, match=r"holds no x\.bin"):
            read(tmp_path / "x.bin")


# -- tensors -------------------------------------------------------------------------------


def test_shared_tensors_are_stored_once_and_come_back_under_every_name(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "model.safetensors"
    serialization.write_tensors(model.state_dict(), path)
    assert list(load_file(path)) == ["embedding.weight"]
    state = serialization.read_tensors(path)
    assert state.keys() == model.state_dict().keys()
    fresh = Tied()
    fresh.load_state_dict(state)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_overlapping_strided_and_empty_tensors_are_each_stored_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "base": base,
        "row": base[1],
        "transposed": base.t(),
        "empty": torch.empty(0),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    serialization.write_tensors(state, tmp_path / "x.safetensors")
    found = serialization.read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
def test_tensors_that_the_format_cannot_hold_are_named(tmp_path: Path, tensor: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'layer\.weight'"):
        serialization.write_tensors({"layer.weight": tensor}, tmp_path / "x.safetensors")


# -- models --------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_models_keep_values_that_are_no_tensors(tmp_path: Path, safe: bool) -> None:
    state = {"weight": torch.randn(3), "_extra_state": {"seen": 5}}
    serialization.write_model(state, tmp_path, index=1, safe=safe)
    found = serialization.read_full_model(tmp_path, index=1)
    assert found["_extra_state"] == {"seen": 5}
    assert torch.equal(found["weight"], state["weight"])


def test_a_file_of_torch_is_loaded_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.ones(2), "array": np.arange(3)}, path)
    found = serialization.load(path)
    assert torch.equal(found["weight"], torch.ones(2))
    assert found["array"].tolist() == [0, 1, 2]
    assert serialization.load(path, map_location="meta")["weight"].is_meta
    with path.open("rb") as file:
        assert set(serialization.load(file)) == {"weight", "array"}
    torch.save(Color.RED, path)
    with pytest.raises(pickle.UnpicklingError):
        serialization.load(path)
    assert serialization.load(path, weights_only=False) is Color.RED


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.array(2.5),
    np.zeros((0, 4), dtype=np.float32),
    np.array([True, False]),
    np.array(["a", "longer"]),
    np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
    np.array([(1, 2.0)], dtype=[("id", "i4"), ("score", "f8")]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_come_back(tmp_path: Path, array: np.ndarray) -> None:
    given = {"best": array, "all": [(array, {"x": array})], "tensor": torch.ones(2)}
    found = round_trip(given, tmp_path)
    for other in (found["best"], found["all"][0][0], found["all"][0][1]["x"]):
        assert other.dtype == array.dtype
        np.testing.assert_array_equal(other, array)
        assert other.flags.writeable
    assert torch.equal(found["tensor"], torch.ones(2))
