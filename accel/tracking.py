"""Experiment trackers, at the documented path: re-exports of `accel.trackers`."""

from __future__ import annotations

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.table import filter_trackers, get_available_trackers
from accel.trackers.tensorboard import TensorBoardTracker

__all__ = [
    "GeneralTracker",
    "TensorBoardTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
]
