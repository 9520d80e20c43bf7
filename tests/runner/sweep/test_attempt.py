"""S1: one attempt at a job goes on with what earlier ones have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runner.launch import launcher
from runner.recipe.schema import Recipe, Trainer
from runner.runs import lock, sessions
from runner.runs.job import Job
from runner.sweep import attempt
from runner.sweep.journal import Journal
from tests.runner.runs.test_directory import add_checkpoint
from tests.runner.written_runs import write_run

RECIPE = Recipe(trainer=Trainer(max_steps=5))
SUMMARY = {
    "complete": True,
    "stopped": "max_steps",
    "step": 5,
    "epoch": 1,
    "seconds": 2.5,
    "monitor": "loss",
    "mode": "min",
    "best": {"value": 0.25, "step": 4, "mode": "min"},
    "metrics": {"validation": {"loss": 0.5}},
}


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """Let a function stand for training; return the jobs that were launched."""
    launched: list[Job] = []

    def launch(job: Job, recipe: Recipe, *, fresh: bool = False) -> int:
        assert lock.holder(job.run_dir) is not None
        launched.append(job)
        sessions.begin(job.place)
        return ENDS.pop(0)(job.place)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", launch)
    ENDS.clear()
    return launched


ENDS: list[Callable[[Path], int]] = []


def finish(session: Path) -> int:
    sessions.end(session, 0, summary=SUMMARY)
    return 0


def stop(session: Path) -> int:
    add_checkpoint(sessions.run_dir_of(session) / "checkpoints", 0)
    return 75


def fail(session: Path) -> int:
    (sessions.run_dir_of(session) / "metrics.jsonl").write_text("early")
    return 1


def die(session: Path) -> int:
    finish(session)
    raise SystemExit(0)


def run(folder: Path, recipe: Recipe = RECIPE) -> int:
    return attempt.run(folder, 0, ("seed=0",), "config", recipe)


def test_a_job_is_trained_once(trains: list[Job], tmp_path: Path) -> None:
    ENDS.append(finish)
    assert [run(tmp_path), run(tmp_path)] == [0, 0]
    assert len(trains) == 1
    state = Journal(tmp_path).state(0)
    assert (state.status, state.objective, state.attempts) == ("finished", 0.25, 1)
    found = {key: state.ended[key] for key in ("step", "best_step", "seconds", "metric", "mode")}
    assert found == {"step": 5, "best_step": 4, "seconds": 2.5, "metric": "loss", "mode": "min"}


def test_a_stopped_job_is_resumed_from_its_checkpoint(trains: list[Job], tmp_path: Path) -> None:
    ENDS.extend([stop, finish])
    assert run(tmp_path) == 75
    assert Journal(tmp_path).state(0).status == "stopped"
    assert run(tmp_path) == 0
    assert [job.resume_from for job in trains] == [
        None,
        str(tmp_path / "0000" / "checkpoints" / "checkpoint_0"),
    ]


def test_a_failed_job_without_a_checkpoint_begins_anew(trains: list[Job], tmp_path: Path) -> None:
    ENDS.extend([fail, finish])
    assert [run(tmp_path), run(tmp_path)] == [1, 0]
    assert trains[1].resume_from is None
    kept = tmp_path / "0000" / "sessions" / "0001"
    assert (kept / "metrics.jsonl").read_text() == "early"
    assert Journal(tmp_path).state(0).attempts == 2


def test_a_finished_job_whose_record_is_missing_is_recognized(
    trains: list[Job], tmp_path: Path
) -> None:
    ENDS.append(die)
    assert run(tmp_path) == 1  # an exit of the user's code
    Journal(tmp_path).path.unlink()
    assert run(tmp_path) == 0
    assert len(trains) == 1
    assert Journal(tmp_path).state(0).is_complete


def test_a_limit_of_the_recipe_is_an_end_and_a_signal_is_none() -> None:
    for stopped in ("max_time", "stop_after"):
        assert attempt.is_finished({"complete": False, "stopped": stopped})
    assert not attempt.is_finished({"complete": False, "stopped": "signal"})
    assert not attempt.is_finished({})


def test_a_run_of_another_recipe_is_left_alone(
    trains: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ENDS.append(stop)
    run(tmp_path)
    assert run(tmp_path, replace(RECIPE, seed=3)) == 2
    assert "seed=3: the run in" in capsys.readouterr().err
    assert len(trains) == 1


def test_a_job_that_another_command_trains_is_busy(trains: list[Job], tmp_path: Path) -> None:
    (tmp_path / "0000").mkdir()
    with lock.held(tmp_path / "0000"):
        assert run(tmp_path) == attempt.BUSY
        attempt.recorded_death(tmp_path, 0, (), 1)
    assert Journal(tmp_path).records() == []


def test_errors_and_interrupts_are_recorded(
    trains: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(session: Path) -> int:
        raise KeyboardInterrupt

    def broken(session: Path) -> int:
        raise ValueError("disk on fire")

    ENDS.extend([interrupt, broken])
    assert [run(tmp_path), run(tmp_path)] == [130, 1]
    statuses = [one["status"] for one in Journal(tmp_path).records() if one["event"] == "ended"]
    assert statuses == ["interrupted", "failed"]
    assert "disk on fire" in capsys.readouterr().err


@pytest.mark.parametrize(("summary", "status"), [({}, "failed"), (SUMMARY, "finished")])
def test_the_death_of_a_process_is_recorded_by_another(
    summary: dict[str, object], status: str, tmp_path: Path
) -> None:
    Journal(tmp_path).started(0, ["seed=0"])
    session = write_run(tmp_path / "0000", summary=False) / "sessions" / "0001"
    if summary:
        sessions.end(session, 0, summary=summary)
    attempt.recorded_death(tmp_path, 0, ["seed=0"], 1)
    attempt.recorded_death(tmp_path, 0, ["seed=0"], 1)  # once is enough
    assert Journal(tmp_path).state(0).status == status
    assert len(Journal(tmp_path).records()) == 2
