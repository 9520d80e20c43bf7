"""One process of a run: which job it takes, where its handlers are set."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from accel import env
from accel.imports import load_attribute
from runner.config.schema import Distributed, Recipe
from runner.launch import attempt, attempts, launcher, worker
from runner.run_dir.job import Job

ALONE = {"RANK": None, "WORLD_SIZE": None, "SLURM_STEP_NUM_TASKS": None, "OMP_NUM_THREADS": None}


# -- endings -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 75])
def test_the_code_of_a_run_is_handed_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "run", lambda run_dir: code)
    assert launcher.run_here(tmp_path) == code


# -- where a job runs ----------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what `launch` decided to do."""
    calls: list[Any] = []
    monkeypatch.setattr(launcher, "run_here", lambda *args: calls.append(("here", *args)) or 0)
    monkeypatch.setattr(attempts, "train", lambda *args: calls.append(("group", *args)) or 0)
    return calls


@pytest.mark.parametrize(
    ("distributed", "fresh", "where"),
    [
        (Distributed(), False, "here"),
        (Distributed(), True, "group"),
        (Distributed(kind="multi_cpu", num_processes=1), False, "here"),
        (Distributed(kind="multi_cpu"), False, "group"),
        (Distributed(kind="multi_cpu", num_processes=1, max_restarts=1), False, "group"),
    ],
)
def test_one_process_stays_here(
    distributed: Distributed, fresh: bool, where: str, tmp_path: Path, chosen: list[Any]
) -> None:
    with env.patched(**ALONE):
        code = launcher.launch(Job(tmp_path), Recipe(distributed=distributed), fresh=fresh)
    assert code == 0
    assert [call[0] for call in chosen] == [where]
    assert (tmp_path / "threads.json").exists() == (where == "here")  # else with each attempt


# -- inside a process ----------------------------------------------------------------------


def test_a_target_is_named_by_module_and_function() -> None:
    assert load_attribute(attempt.TRAIN) is worker.run


def test_handlers_are_set_for_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def train(job: Job, recipe: Recipe, stop: object) -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(worker, "_train", train)
    monkeypatch.setattr(Job, "load", lambda run_dir: (Job(tmp_path), Recipe()))
    assert worker.run(tmp_path) == 0
    assert seen[0] != before
    assert signal.getsignal(signal.SIGTERM) == before
