"""S1, R6: one attempt at a job, whatever an earlier command has left of its run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.recipe.schema import Recipe
from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep import attempt
from tests.runner.sweep.stand_ins import begin_job, end_job

ENDS: list[Callable[[Path], int]] = []


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call what the test has put into `ENDS` in place of training."""
    ENDS.clear()

    def continue_in(run_dir: Path, *_: Any, **__: Any) -> int:
        return ENDS.pop(0)(begin_job(run_dir.parent, int(run_dir.name)))

    monkeypatch.setattr(attempt.start_run, "continue_in", continue_in)
    monkeypatch.setattr(attempt.resumable, "require_same", lambda *_: None)


def run(folder: Path) -> int:
    return attempt.run(folder, 0, ["seed=0"], "config", Recipe())


def done(session: Path) -> int:
    end_job(session, 0.25)
    return 0


def interrupted(session: Path) -> int:
    raise KeyboardInterrupt


def broken(session: Path) -> int:
    raise ValueError("disk on fire")


def test_a_finished_job_is_not_trained_again(tmp_path: Path) -> None:
    ENDS.extend([interrupted, broken, done])
    assert [run(tmp_path) for _ in range(4)] == [130, 1, 0, 0]
    assert len(list(tmp_path.glob("0000/sessions/*"))) == 3


def test_a_job_that_another_command_trains_is_busy(tmp_path: Path) -> None:
    (tmp_path / "0000").mkdir()
    with lock.held(tmp_path / "0000"):
        assert run(tmp_path) == attempt.BUSY


def test_the_death_of_a_process_is_recorded_by_its_parent(tmp_path: Path) -> None:
    attempt.record_death(tmp_path, 0, 1, "it was killed")  # before there was anything
    session = begin_job(tmp_path, 0)
    attempt.record_death(tmp_path, 0, 1, "it was killed")
    attempt.record_death(tmp_path, 0, 1, "it exited with 3")  # once is enough
    assert RunRecord(tmp_path / "0000").reason == "it was killed"
    session = begin_job(tmp_path, 0)
    end_job(session, 0.5)
    assert attempt.record_death(tmp_path, 0, 1, "its process was killed behind it") == 0
    assert json.loads((session / "ended.json").read_text())["code"] == 0
