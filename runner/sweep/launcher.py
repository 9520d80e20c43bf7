"""The launcher that a sweeper starts its jobs with."""

from __future__ import annotations

import os

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from accel.machine import parent_watch


def instantiate_launcher(
    *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
) -> Launcher:
    """Return the launcher of a sweep, whose processes end with this one.

    Each worker of joblib's watches this process from its own start on, before it has a job: joblib
    lets a worker without a job wait for one for five minutes.
    """
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=hydra_context, task_function=task_function, config=config
    )
    arguments = getattr(launcher, "joblib", None)  # of `joblib.Parallel`
    if isinstance(arguments, dict):
        arguments.update(initializer=parent_watch.die_with, initargs=(os.getpid(),))
    return launcher
