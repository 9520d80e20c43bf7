"""Durations as recipes give them: seconds or "HH:MM:SS". Free of torch."""

from __future__ import annotations

import re

from accel.machine.errors import ConfigError


def parse_duration(value: object, name: str = "trainer.max_time") -> float | None:
    """Return seconds, given as such or as "[D:]HH:MM:SS"; None stays None; else a ConfigError."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", value):
        days, hours, minutes, seconds = ([0] + [int(part) for part in value.split(":")])[-4:]
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    raise ConfigError.of(
        f"{name}={value!r}",
        'it is a number of seconds above 0, or "HH:MM:SS"',
        f"Give {name}=3600 or {name}=01:00:00 for an hour.",
    )
