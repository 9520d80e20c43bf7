"""Trackers: what is chosen, what is written, and who writes."""

from __future__ import annotations

import pytest

from accel import Accelerator
from accel.trackers.base import flatten
from accel.tracking import GeneralTracker


def test_a_tracker_class_says_what_it_lacks() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="Half"):
        Accelerator(cpu=True, log_with=Half)


def test_nested_configurations_become_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}
