"""Memory of the device, at the path of older releases: a re-export of `accel.memory`."""

from __future__ import annotations

from accel.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
