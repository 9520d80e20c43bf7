"""L1: `runner show` tells everything that is known of a run, and nothing invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.directory import Manifest
from runner.reporting import describe_run
from runner.runs import json_files
from runner.runs.record import CUT_OFF, RunRecord
from tests.runner.reporting.printed import printed
from tests.runner.written_runs import session_of, write, write_failure, write_run, write_session


def text(path: Path) -> str:
    return printed(describe_run.show, describe_run.describe(RunRecord(path)))


def write_checkpoint(path: Path) -> None:
    folder = path / "checkpoints" / "checkpoint_0"
    folder.mkdir(parents=True)
    body = Manifest({}, {"world_size": 1}, {"step": 20}).to_json()
    (folder / checkpoints.MANIFEST).write_text(body)


def test_a_run_is_described(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {"optimizer.lr": 0.01}, best=0.25)
    write_checkpoint(path)
    (path / "checkpoints" / "checkpoint_1").mkdir()
    json_files.add_evaluation(
        path, {"checkpoint": "checkpoint_0", "metrics": {"test": {"loss": 1.25}}}
    )
    found = describe_run.describe(RunRecord(path))
    complete, broken = found["checkpoints"]
    assert (complete["step"], complete["complete"], broken["complete"]) == (20, True, False)
    shown = text(path)
    for expected in (
        "checkpoint_1  incomplete: it has no manifest.json",
        "best         loss 0.2500 at step 10",
        "loss 1.2500  (checkpoint_0",
        "torch 2.13.0",
        "no git work tree",
        "trainer.epochs=…",
        "runner again",
    ):
        assert expected in shown, expected


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False, metrics=2)
    write_failure(path, "ValueError: [x]")
    shown = text(path)
    assert "failed  ValueError: [x]" in shown
    assert 'File "model.py", line 3' in shown
    assert "last (validation)  loss 1.1000" in shown


def test_a_run_that_died_is_shown_with_the_command_that_resumes_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False)  # begun, its lock is free, and it has no end
    again = f"runner again {path}"
    assert "resume " not in text(path)  # there is no checkpoint
    write_checkpoint(path)
    shown = text(path)
    assert f"status       {CUT_OFF}" in shown
    assert f"resume       runner resume={path}" in shown
    assert again in shown


def test_a_broken_run_is_described_as_such(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    shown = text(tmp_path / "a")
    assert "broken  config.yaml is missing" in shown
    assert "runner again" not in shown


def test_earlier_code_of_a_run_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    write(write_session(path) / "environment.json", {"packages": {"torch": "2.9"}})
    shown = text(path)
    assert "in earlier sessions: 0001" in shown


@pytest.mark.parametrize("content", [None, '{"git": {'])
def test_without_a_record_git_is_not_known(content: str | None, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    lost = session_of(path) / "environment.json"
    lost.unlink() if content is None else lost.write_text(content)
    shown = text(path)
    assert "no git work tree" not in shown
    assert "not known" in shown


def test_a_submitted_run_is_resumed_by_another_job(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False)

    write_checkpoint(path)
    write(session_of(path) / "submitted.json", {"job": "7"})
    write_session(path)
    assert f"runner submit resume={path}" in text(path)
