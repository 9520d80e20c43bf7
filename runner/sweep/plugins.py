"""Hydra's plugins of a sweep: our launchers, and the sweeper of known jobs.

Hydra takes plugins from modules called ``hydra_plugins.…`` alone, so this module has such a name,
too, while the runner is loaded.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.recipe import launchers
from runner.sweep.launcher import instantiate_launcher
from runner.sweep.task_launcher import TaskLauncher

if TYPE_CHECKING:
    from runner.sweep.task import Task

LOCAL, KNOWN, SLURM = "local", "known", "submitit_slurm"
PLACE = launchers.MODULE


class LocalLauncher(TaskLauncher):
    """Runs jobs on this machine, in forks of the server of the task."""

    __module__ = PLACE

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        return self.task_function.run_here(job_overrides, initial_job_idx)


class RayLauncher(TaskLauncher):
    """Runs jobs in a Ray cluster; its arguments are the keys of `hydra.launcher`."""

    __module__ = PLACE

    def __init__(self, **settings: object) -> None:
        self._settings = {name: _plain(value) for name, value in settings.items()}

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        from runner.launch import ray_cluster
        from runner.sweep.ray_jobs import Jobs

        address: Any = self._settings["address"]
        with ray_cluster.connected(address, f"{launchers.NODE}.address") as ray:
            jobs = Jobs(ray, self._settings)
            return self.task_function.run_with(jobs, jobs, job_overrides, initial_job_idx)


def _plain(value: object) -> object:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


class KnownJobs(Sweeper):
    """Launches the jobs of the task that are not finished; a failed one stops no other."""

    __module__ = PLACE
    _task: Task

    def __init__(self, max_batch_size: int | None = None, params: None = None) -> None:
        """Launch at most `max_batch_size` jobs at a time; `params` is refused in files."""
        self._size = max_batch_size

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the task, and set up the launcher."""
        self._task = task_function  # type: ignore[assignment]
        self._launcher = instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Launch the jobs; the arguments are in their overrides."""
        jobs = self._task.pending_overrides()
        size = self._size or max(1, len(jobs))
        for start in range(0, len(jobs), size):
            self._task.launch_with(self._launcher, jobs[start : start + size], start)


@dataclass
class LocalConf:
    """Configuration of the launcher."""

    _target_: str = f"{PLACE}.LocalLauncher"


@dataclass
class KnownConf:
    """Configuration of the sweeper: the keys of Hydra's basic one."""

    _target_: str = f"{PLACE}.KnownJobs"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


def slurm_target() -> str:
    """Return the override that lets our launcher take the keys of `hydra.launcher` on Slurm."""
    from runner.sweep import slurm_launcher

    slurm_launcher.SlurmLauncher.__module__ = PLACE
    sys.modules[PLACE].SlurmLauncher = slurm_launcher.SlurmLauncher  # type: ignore[attr-defined]
    Plugins.instance().register(slurm_launcher.SlurmLauncher)
    return f"hydra.launcher._target_={PLACE}.SlurmLauncher"


def _alias() -> None:
    """Let this module be found under the name that Hydra wants."""
    package, _, _ = PLACE.partition(".")
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:  # no other plugin is installed
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    sys.modules[PLACE] = sys.modules[__name__]


def register() -> None:
    """Make the plugins known to Hydra."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name=LOCAL, node=LocalConf, provider="runner")
    store.store(group="hydra/sweeper", name=KNOWN, node=KnownConf, provider="runner")
    _alias()
    for plugin in (LocalLauncher, RayLauncher, KnownJobs):
        Plugins.instance().register(plugin)
