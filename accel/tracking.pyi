# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.trackers.aim import AimTracker as AimTracker
from accel.trackers.base import GeneralTracker as GeneralTracker
from accel.trackers.base import on_main_process as on_main_process
from accel.trackers.clearml import ClearMLTracker as ClearMLTracker
from accel.trackers.comet_ml import CometMLTracker as CometMLTracker
from accel.trackers.csv import CSVTracker as CSVTracker
from accel.trackers.dvclive import DVCLiveTracker as DVCLiveTracker
from accel.trackers.mlflow import MLflowTracker as MLflowTracker
from accel.trackers.swanlab import SwanLabTracker as SwanLabTracker
from accel.trackers.table import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accel.trackers.table import filter_trackers as filter_trackers
from accel.trackers.table import get_available_trackers as get_available_trackers
from accel.trackers.table import register_tracker_class as register_tracker_class
from accel.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel.trackers.trackio import TrackioTracker as TrackioTracker
from accel.trackers.wandb import WandBTracker as WandBTracker

__all__: list[str]
