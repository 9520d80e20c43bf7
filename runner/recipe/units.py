"""Durations, counts and sizes as people write and read them. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Interval:
    """How often something is due: every so many steps, epochs or seconds."""

    every: float
    unit: str

    def crossed(self, before: float, now: float) -> bool:
        """Return whether a multiple lies in (before, now], both in `unit`."""
        # A sum of fractions of an epoch misses its multiples by some 1e-16.
        return math.floor(now / self.every + 1e-9) > math.floor(before / self.every + 1e-9)


def parse_interval(value: object, name: str) -> Interval | None:
    """Return an interval: steps, a fraction of an epoch, "2 epochs", "HH:MM:SS"; None stays None.

    Raises:
        ConfigError: if it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Interval(value, "steps")
    if isinstance(value, float) and 0.0 < value < 1.0:
        return Interval(value, "epochs")
    if isinstance(value, str):
        if found := re.fullmatch(r"([1-9]\d*) (step|epoch)s?", value):
            return Interval(int(found[1]), f"{found[2]}s")
        if ":" in value and (seconds := parse_duration(value, name)):
            return Interval(seconds, "seconds")
    raise ConfigError.of(
        f"{name}={value!r}",
        "it is a number of steps, a fraction of an epoch below 1.0, epochs, or a time",
        f"Give {name}=100, {name}=0.25, '{name}=2 epochs' or {name}=00:10:00.",
    )


def counted(count: int, singular: str) -> str:
    """Return e.g. "1 step" or "1,200 steps"."""
    plural = f"{singular}es" if singular.endswith("s") else f"{singular}s"
    return f"{count:,} {singular if count == 1 else plural}"


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` next to `value`, the lower first."""
    below = value // divisor * divisor
    return [size for size in (below, below + divisor) if size > 0]


def size(num_bytes: float) -> str:
    """Return e.g. "512 B" or "2.6 MB" (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
