"""Sweepers: the jobs of a grid or a list, and a search with Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.accel_runner.launchers import OtherLauncher, TaskLauncher

if TYPE_CHECKING:
    from runner.sweep.task import Task


class TaskSweeper(Sweeper):
    """Base of sweepers over the task of the runner's sweeps, under any launcher."""

    task: Task
    launcher: Launcher

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task, and set up the launcher."""
        self.task = task_function  # type: ignore[assignment]
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        own = isinstance(launcher, TaskLauncher)
        self.launcher = launcher if own else cast(Launcher, OtherLauncher(launcher))


class KnownJobs(TaskSweeper):
    """Launches the jobs of the task that are not finished, whatever becomes of the others."""

    def sweep(self, arguments: list[str]) -> None:
        """Launch the jobs; the arguments are in their overrides."""
        jobs = self.task.pending_overrides()
        size = int(str(self.settings["max_batch_size"] or max(1, len(jobs))))
        for start in range(0, len(jobs), size):
            self.launcher.launch(jobs[start : start + size], start)


class OptunaSweeper(TaskSweeper):
    """Searches with Optuna, from where an earlier command has left off."""

    def sweep(self, arguments: list[str]) -> None:
        """Search until the study has as many trials as it wants."""
        from runner.sweep.optuna.search import search

        search(arguments, self.settings, self.task, self.launcher)
