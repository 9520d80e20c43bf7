"""Trackers: what is chosen, what is written, and who writes (E1, R8)."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from accel import Accelerator
from accel.machine.enums import LoggerType
from accel.trackers.base import detached, images_of, plain, scalars_and_texts
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
