"""One process of a run: which job it takes, where its handlers are set (R9)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from accel.machine import env
from accel.machine.imports import load_attribute
from runner.exit_codes import FAILED
from runner.launch import attempt, attempts, launcher, worker
from runner.recipe.processes import Adopted
from runner.recipe.schema import Distributed, Recipe
from runner.run_dir.job import Job

ALONE = {"RANK": None, "WORLD_SIZE": None, "SLURM_STEP_NUM_TASKS": None, "OMP_NUM_THREADS": None}


# -- endings -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 75])
def test_the_code_of_a_run_is_handed_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "run", lambda run_dir, stop: code)
    assert launcher.run_here(tmp_path) == code


def test_a_rank_that_has_failed_ends_with_its_code_whatever_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def fail(*given: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)  # srun's: another rank has ended
        return FAILED

    def end(code: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        codes.append(code)

    monkeypatch.setattr(launcher, "run_here", fail)
    monkeypatch.setattr(worker, "end_process", end)
    launcher.run_adopted(tmp_path, Adopted(1, 0, 2, 1))
    assert codes == [FAILED]


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
