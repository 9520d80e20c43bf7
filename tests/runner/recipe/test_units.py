"""C1: durations and sizes as people write them."""

from __future__ import annotations

import pytest

from accel.machine.errors import ConfigError
from runner.recipe.units import Interval, parse_duration, parse_interval


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (90, 90.0),
        (0.5, 0.5),
        ("00:01:30", 90.0),
        ("36:00:00", 129_600.0),
        ("2:00:00:01", 172_801.0),
    ],
)
def test_durations(value: object, seconds: float | None) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["1h", "90", 0, -1, True, "00:61:00", [1]])
def test_a_duration_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time=.*HH:MM:SS"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        (100, Interval(100, "steps")),
        ("1 step", Interval(1, "steps")),
        (0.25, Interval(0.25, "epochs")),
        ("2 epochs", Interval(2, "epochs")),
        ("00:10:00", Interval(600, "seconds")),
    ],
)
def test_intervals(value: object, found: Interval | None) -> None:
    assert parse_interval(value, "trainer.eval_every") == found


@pytest.mark.parametrize("value", [0, -1, True, 1.5, 0.0, "0 epochs", "2 hours", "ten", [1]])
def test_an_interval_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.eval_every=.*'trainer.eval_every=2 epochs'"):
        parse_interval(value, "trainer.eval_every")
