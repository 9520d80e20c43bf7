"""Comparisons of versions, at the documented path: re-exports."""

from __future__ import annotations

from accel.machine.imports import (
    compare_versions,
    is_torch_version,
)

__all__ = [
    "compare_versions",
    "is_torch_version",
]
