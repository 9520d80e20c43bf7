"""Memory of the device, at the path of older releases: a re-export of `accel.machine.memory`."""

from __future__ import annotations

from accel.machine.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
