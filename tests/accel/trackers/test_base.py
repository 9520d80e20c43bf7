"""Trackers: what is chosen, what is written, and who writes (E1, R8)."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from accel import Accelerator
from accel.machine.enums import LoggerType
from accel.machine.errors import StateError
from accel.trackers.base import (
    LibraryTracker,
    detached,
    images_of,
    plain,
    scalars_and_texts,
)
from accel.tracking import GeneralTracker


def test_a_tracker_class_says_what_it_lacks() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="Half"):
        Accelerator(cpu=True, log_with=Half)
    blank = Half(_blank=True)
    assert (blank.resume_arguments("a"), blank.failed, blank.run_id) == ({}, False, None)


class Color(Enum):
    """Its value is no text."""

    RED = (1, 0)


def test_configurations_become_types_that_every_library_stores() -> None:
    values = {
        "kind": LoggerType.CSV,
        Color.RED: Color.RED,
        "path": Path("a"),
        "parts": [np.float32(0.5), torch.tensor(2), {"dtype": torch.float32}],
        "betas": (0.9, 1),
        "flags": {True},
        "none": None,
    }
    found = plain(values)
    assert found == {
        "kind": "csv",
        "[1, 0]": [1, 0],
        "path": "a",
        "parts": [0.5, 2, {"dtype": "torch.float32"}],
        "betas": [0.9, 1],
        "flags": [True],
        "none": None,
    }
    assert (type(found["kind"]), type(found["flags"][0])) == (str, bool)


class Run:
    """A run object of a library."""

    def __init__(self) -> None:
        self.closed: list[bool] = []

    def log_artifact(self, path: str) -> str:
        return f"artifact {path}"


class Library(LibraryTracker):
    """A tracker over `Run`."""

    name = "library"
    requires_logging_directory = False

    def __init__(self, run_name: str) -> None:
        super().__init__(run_name)
        self.opened = 0

    def _open(self) -> Run:
        self.opened += 1
        return Run()

    def _close(self, run: Run) -> None:
        run.closed.append(self.failed)


def test_a_librarys_run_is_opened_and_closed_once() -> None:
    tracker = Library("run")
    assert tracker.opened == 0
    with pytest.raises(AttributeError, match="log_artifact"):
        tracker.log_artifact("x")
    tracker.start()
    tracker.start()
    run = tracker.tracker
    assert (tracker.opened, tracker.log_artifact("x")) == (1, "artifact x")
    tracker.failed = True
    tracker.finish()
    tracker.finish()
    assert run.closed == [True]
    with pytest.raises(StateError, match=r"library.*finished"):
        assert tracker.tracker


def test_values_are_plain_numbers_and_texts(caplog: pytest.LogCaptureFixture) -> None:
    values = {"loss": torch.tensor(0.5), "parts": {"a": np.float32(2), "b": True}, "note": "fine"}
    numbers = {"loss": 0.5, "parts/a": 2.0, "parts/b": 1.0}
    assert scalars_and_texts(values) == (numbers, {"note": "fine"})
    wrong = {"a": [1, 2], "b": None, "c": torch.ones(2), "d": 1}
    for _ in range(2):
        assert scalars_and_texts({"wrong": wrong}) == ({"wrong/d": 1.0}, {})
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" is skipped")[0] for text in told] == [
        "log: wrong/a of type list",
        "log: wrong/b of type NoneType",
        "log: wrong/c of type Tensor",
    ]
    table = object()
    kept = detached({"loss": torch.tensor([3]), "parts": {"a": torch.tensor(1.5)}, "table": table})
    assert kept == {"loss": 3, "parts": {"a": 1.5}, "table": table}


def test_images_of_shares_become_bytes() -> None:
    """Not every library scales floats; all of them know bytes."""
    shares, wanted = torch.tensor([[0.0, 0.25], [0.5, 1.0]]), [[0, 63], [127, 255]]
    for pixels in (shares, shares.bfloat16(), shares.half(), shares.numpy()):
        (image,) = images_of(pixels)
        assert (image.dtype, image.tolist()) == (np.uint8, wanted)
    (mask,) = images_of(shares > 0.3)
    assert (mask.dtype, mask.tolist()) == (np.uint8, [[0, 0], [255, 255]])
    (eight_bits,) = images_of(shares.to(torch.float8_e4m3fn))
    assert eight_bits.tolist() == wanted
    dark, bright = images_of([shares.numpy(), 255 * shares.numpy()])  # one range for all
    assert (dark.max(), bright.max()) == (1.0, 255.0)
    for others in (2 * shares.numpy(), shares.numpy() - 0.5, np.array([[0, 1], [1, 0]])):
        np.testing.assert_array_equal(images_of(others)[0], others)


def test_images_are_a_list_with_channels_last() -> None:
    assert [one.shape for one in images_of(torch.zeros(2, 3, 8, 4))] == [(8, 4, 3)] * 2
    assert [one.shape for one in images_of(torch.zeros(1, 8, 4))] == [(8, 4)]
    assert [one.shape for one in images_of(np.zeros((2, 8, 4, 1)))] == [(8, 4)] * 2
    assert [one.shape for one in images_of(np.zeros((8, 4, 3)))] == [(8, 4, 3)]
    assert [one.shape for one in images_of(np.zeros((2, 3, 8, 6)))] == [(8, 6, 3)] * 2
    assert [one.shape for one in images_of([np.zeros((8, 4)), torch.zeros(3, 8, 4)])] == [
        (8, 4),
        (8, 4, 3),
    ]
    assert [one.shape for one in images_of(np.zeros((8, 28, 28)))] == [(28, 28)] * 8
    assert [one.shape for one in images_of(torch.zeros(8, 28, 28))] == [(28, 28)] * 8
    picture = object()
    assert images_of(picture) == [picture]
