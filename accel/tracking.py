"""Experiment trackers, at the documented path: re-exports of `accel.trackers`."""

from __future__ import annotations

from accel.trackers.aim import AimTracker
from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.clearml import ClearMLTracker
from accel.trackers.comet_ml import CometMLTracker
from accel.trackers.csv import CSVTracker
from accel.trackers.dvclive import DVCLiveTracker
from accel.trackers.mlflow import MLflowTracker
from accel.trackers.swanlab import SwanLabTracker
from accel.trackers.table import (
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel.trackers.tensorboard import TensorBoardTracker
from accel.trackers.trackio import TrackioTracker
from accel.trackers.wandb import WandBTracker

__all__ = [
    "AimTracker",
    "CSVTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
