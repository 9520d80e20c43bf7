"""C1: durations and sizes as people write them."""

from __future__ import annotations

import pytest

from accel.machine.errors import ConfigError
from runner.recipe.units import parse_duration


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
