"""Launchers of a sweep's jobs: on this machine, in a Ray cluster, on Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from runner.sweep.task import Task

Overrides = Sequence[Sequence[str]]


class TaskLauncher(Launcher):
    """Base of launchers that need the task, and of Hydra's configuration their own keys alone."""

    task: Task

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task of the sweep."""
        self.task = task_function  # type: ignore[assignment]


class OtherLauncher:
    """A launcher that composes jobs with Hydra, which has its own word for ``group=null``."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def launch(self, job_overrides: Overrides, initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        from runner.recipe import hydra_setup

        jobs = [hydra_setup.for_hydra(overrides) for overrides in job_overrides]
        return self._launcher.launch(jobs, initial_job_idx)


class LocalLauncher(TaskLauncher):
    """Runs jobs on this machine, in forks of a warm server."""

    def launch(self, job_overrides: Overrides, initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        return self.task.run_here(job_overrides, initial_job_idx)


class RayLauncher(TaskLauncher):
    """Runs jobs in a Ray cluster."""

    def launch(self, job_overrides: Overrides, initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        from runner.sweep import ray_jobs

        return ray_jobs.launch(self.task, self.settings, job_overrides, initial_job_idx)


class SlurmLauncher(TaskLauncher):
    """Runs jobs as an array on Slurm."""

    def launch(self, job_overrides: Overrides, initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        from runner.sweep import slurm

        return slurm.launch(self.task, self.settings, job_overrides, initial_job_idx)
