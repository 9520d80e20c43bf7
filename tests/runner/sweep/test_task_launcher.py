"""Our launchers run the jobs of the task that Hydra hands to them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from runner.sweep.plugins import LocalLauncher, RayLauncher
from runner.sweep.slurm_launcher import SlurmLauncher
from runner.sweep.task_launcher import TaskLauncher


@pytest.mark.parametrize("kind", [LocalLauncher, RayLauncher, SlurmLauncher])
def test_the_task_is_kept(kind: type[TaskLauncher]) -> None:
    launcher, task = kind(), cast("Any", object())
    context = cast("Any", None)
    launcher.setup(hydra_context=context, task_function=task, config=OmegaConf.create())
    assert launcher.task_function is task
