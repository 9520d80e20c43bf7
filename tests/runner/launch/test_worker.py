"""One process of a run: which job it takes, where its handlers are set (R9)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runner.exit_codes import FAILED
from runner.launch import launcher, worker
from runner.recipe.processes import Adopted
from runner.recipe.schema import Recipe
from runner.runs.job import Job

# -- endings -------------------------------------------------------------------------------


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


# -- inside a process ----------------------------------------------------------------------


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
