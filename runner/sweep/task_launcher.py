"""What our launchers of a sweep's jobs have in common: they hand the jobs to its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from runner.sweep.task import Task


class TaskLauncher(Launcher):
    """Base of launchers that need nothing of Hydra's configuration but their own arguments."""

    task_function: Task

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task, which is that of every sweep of the runner."""
        self.task_function = task_function  # type: ignore[assignment]
