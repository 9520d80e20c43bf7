"""Counts and sizes in messages, and sizes to propose. Free of torch."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Return e.g. "1 step" or "1,200 steps"."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


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
