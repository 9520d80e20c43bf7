"""Hydra finds the plugins of a sweep."""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from runner.sweep import plugins


class Task:
    """Records what is launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[list[list[str]], int]] = []

    def pending_overrides(self) -> list[list[str]]:
        return [[f"seed={seed}"] for seed in range(5)]

    def launch_with(self, launcher: Any, jobs: list[list[str]], start: int) -> None:
        assert isinstance(launcher, plugins.LocalLauncher)
        self.launched.append((jobs, start))

    def run_here(self, job_overrides: Any, first: int) -> Any:
        return [(list(job_overrides), first)]


def config(size: int | None) -> Any:
    sweeper = OmegaConf.structured(plugins.KnownConf(max_batch_size=size))
    launcher = OmegaConf.structured(plugins.LocalConf())
    return OmegaConf.create({"hydra": {"sweeper": sweeper, "launcher": launcher}})


def test_the_sweeper_launches_the_jobs_of_the_task_in_batches() -> None:
    plugins.register()
    for size, expected in ((None, [0]), (2, [0, 2, 4])):
        task: Any = Task()
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=None,  # type: ignore[arg-type]
            task_function=task,
            config=config(size),
        )
        sweeper.sweep([])
        assert [start for _, start in task.launched] == expected
        assert [job for jobs, _ in task.launched for job in jobs] == task.pending_overrides()


def test_the_launcher_runs_jobs_through_the_task() -> None:
    plugins.register()
    task: Any = Task()
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=None,  # type: ignore[arg-type]
        task_function=task,
        config=config(None),
    )
    assert launcher.launch([["seed=1"]], 7) == [([["seed=1"]], 7)]
