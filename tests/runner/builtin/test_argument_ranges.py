"""Ranges of the arguments of shipped factories."""

from __future__ import annotations

import math

import pytest

from accel.machine.errors import ConfigError
from runner.builtin.argument_ranges import check


def test_numbers_within_their_range_pass() -> None:
    check("model", width=(1, 1, 4), rate=(0.5, 0.0, math.inf))


def test_every_number_outside_of_its_range_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check("model", width=(5, 1, 4), rate=(math.inf, 0.0, math.inf), depth=(2, 1, 3))
    assert [str(problem.value) for problem in caught.value.problems] == [
        "model.width=5",
        "model.rate=inf",
    ]
    assert [problem.rule for problem in caught.value.problems] == [
        "it must be from 1 to 4",
        "it must be finite and at least 0",
    ]
