"""Sizes of the parallel axes, at the documented path: re-exports of `accel.config.parallelism`."""

from __future__ import annotations

from accel.config.parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]
