"""Ranges of the arguments of shipped factories, all checked at once. Free of torch."""

from __future__ import annotations

import math

from accel.machine.errors import ConfigError, Problem


def check(node: str, **limits: tuple[float, float, float]) -> None:
    """Raise if an argument of a node is outside of its range.

    Each is given as (value, least, most), both allowed; an infinite one is no limit.

    Raises:
        ConfigError: naming every such number.
    """
    ConfigError.raise_if(
        [
            Problem(f"{node}.{name}={value}", _rule(least, most), "Correct the value.")
            for name, (value, least, most) in limits.items()
            if not least <= value <= most or not math.isfinite(value)
        ]
    )


def _rule(least: float, most: float) -> str:
    if math.isinf(most):
        return f"it must be finite and at least {least:g}"
    return f"it must be from {least:g} to {most:g}"
