"""NumPy arrays of a state, in a safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from accel.checkpoint import directory, serialization
from accel.machine.errors import CheckpointError
from tests.accel.checkpoint.parts import build
from tests.accel.checkpoint.test_serialization import round_trip
from tests.accel.checkpoint.test_session import Counter as Registered


def test_numpy_arrays_of_registered_objects_come_back(tmp_path: Path) -> None:
    run = build()
    history = {"losses": np.linspace(0.0, 1.0, 5), "rng": np.random.MT19937(3).state}
    run.accelerator.register_for_checkpointing(Registered(history))
    run.accelerator.save_state(tmp_path)
    assert "custom_checkpoint_0.pkl.arrays.safetensors" in directory.verify(tmp_path).files
    other, counter = build(seed=5), Registered()
    other.accelerator.register_for_checkpointing(counter)
    other.accelerator.load_state(tmp_path)
    np.testing.assert_array_equal(counter.value["losses"], history["losses"])
    twin = np.random.MT19937()
    twin.state = counter.value["rng"]
    assert twin.random_raw(3).tolist() == np.random.MT19937(3).random_raw(3).tolist()


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.array(2.5),
    np.zeros((0, 4), dtype=np.float32),
    np.array([True, False]),
    np.array([1, 2], dtype=">i4"),
    np.array([1 + 2j]),
    np.array([0.1], dtype=np.longdouble),
    np.array(["a", "longer"]),
    np.array([b"x", b"yz"]),
    np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
    np.array([(1, 2.0)], dtype=[("id", "i4"), ("score", "f8")]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_come_back_and_are_pickled_nowhere(tmp_path: Path, array: np.ndarray) -> None:
    given = {"best": array, "all": [(array, {"x": array})], "tensor": torch.ones(2)}
    found = round_trip(given, tmp_path)
    for other in (found["best"], found["all"][0][0], found["all"][0][1]["x"]):
        assert other.dtype == array.dtype
        np.testing.assert_array_equal(other, array)
        assert other.flags.writeable
    assert torch.equal(found["tensor"], torch.ones(2))
    for path in tmp_path.iterdir():
        assert b"numpy.core" not in path.read_bytes()
        assert b"numpy._core" not in path.read_bytes()


def test_arrays_that_are_missing_are_named(tmp_path: Path) -> None:
    serialization.save_plain({"x": np.ones(2)}, tmp_path / "x.bin", "x")
    (tmp_path / "x.bin.arrays.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x\.bin\.arrays\.safetensors"):
        serialization.load_plain(tmp_path / "x.bin")
