"""The runner's plugins for Hydra, which looks for them in the namespace `hydra_plugins`.

They are the search path of `conf`, the launchers of a sweep's jobs, and the sweepers: a grid or a
list, and a search with Optuna. Hydra imports this module at each start of any of its applications,
so that nothing heavy is imported before a plugin is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from runner.sweep.job import Task

Overrides = Sequence[Sequence[str]]


class ProjectSearchPath(SearchPathPlugin):
    """Makes the shipped `conf` whole: its schema, and the `conf` folders of the user's project.

    Any Hydra program may compose it; others keep their search path.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders."""
        from runner.recipe import paths

        main = [found.path for found in search_path.get_path() if found.provider == "main"]
        if [Path(path.removeprefix("file://")).resolve() for path in main] != [
            paths.conf_folder().resolve()
        ]:
            return
        from runner.recipe import hydra_setup

        hydra_setup.prepare()
        for folder in paths.project_conf_folders():
            search_path.append("project", f"file://{folder}")
        for place in paths.given_conf_folders:
            search_path.append("command line", place)


class OfTask:
    """What a launcher and a sweeper of ours keep: their own keys, and the task of the sweep."""

    task: Task

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task of the sweep."""
        self.task = task_function  # type: ignore[assignment]


class TaskLauncher(OfTask, Launcher):
    """Base of launchers that need the task, and of Hydra's configuration their own keys alone."""


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


class TaskSweeper(OfTask, Sweeper):
    """Base of sweepers over the task of the runner's sweeps, under any launcher."""

    launcher: Launcher

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task, and set up the launcher."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
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
