"""L1: `runner show` tells everything that is known of a run, and nothing invented."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.directory import Manifest
from runner.reporting import describe_run
from runner.runs import evaluations
from runner.runs.record import CUT_OFF, RunRecord
from tests.runner.written_runs import (
    session_of,
    write,
    write_failure,
    write_run,
    write_session,
)


def text(found: dict[str, object]) -> str:
    out = io.StringIO()
    describe_run.show(found, Console(file=out, width=300))
    return out.getvalue()


def write_checkpoint(path: Path) -> None:
    folder = path / "checkpoints" / "checkpoint_0"
    folder.mkdir(parents=True)
    body = Manifest({}, {"world_size": 1}, {"step": 20}).to_json()
    (folder / checkpoints.MANIFEST).write_text(body)


def test_a_run_is_described(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {"optimizer.lr": 0.01}, best=0.25)
    write_checkpoint(path)
    (path / "checkpoints" / "checkpoint_1").mkdir()
    evaluations.add(path, {"checkpoint": "checkpoint_0", "metrics": {"test": {"loss": 1.25}}})
    found = describe_run.describe(RunRecord(path))
    complete, broken = found["checkpoints"]
    assert (complete["step"], complete["complete"], broken["complete"]) == (20, True, False)
    shown = text(found)
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
    assert json.loads(describe_run.as_json([found]))["status"] == "finished"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False, metrics=2)
    write_failure(path, "ValueError: [x]")
    shown = text(describe_run.describe(RunRecord(path)))
    assert "failed  ValueError: [x]" in shown
    assert 'File "model.py", line 3' in shown
    assert "last (validation)  loss 1.1000" in shown


def test_a_run_that_died_is_shown_with_the_command_that_resumes_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False)  # begun, its lock is free, and it has no end
    again = f"runner again {path}"
    assert "resume " not in text(describe_run.describe(RunRecord(path)))  # there is no checkpoint
    write_checkpoint(path)
    shown = text(describe_run.describe(RunRecord(path)))
    assert f"status       {CUT_OFF}" in shown
    assert f"resume       runner resume={path}" in shown
    assert again in shown


def test_a_broken_run_is_described_as_such(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = describe_run.describe(RunRecord(tmp_path / "a"))
    assert "broken  config.yaml is missing" in text(found)
    assert "runner again" not in text(found)
    assert len(json.loads(describe_run.as_json([found, found]))) == 2


def test_earlier_code_of_a_run_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    write(write_session(path) / "environment.json", {"packages": {"torch": "2.9"}})
    shown = text(describe_run.describe(RunRecord(path)))
    assert "earlier sessions had other code, versions or data: 0001" in shown


@pytest.mark.parametrize("content", [None, '{"git": {'])
def test_without_a_record_git_is_not_known(content: str | None, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    lost = session_of(path) / "environment.json"
    lost.unlink() if content is None else lost.write_text(content)
    shown = text(describe_run.describe(RunRecord(path)))
    assert "no git work tree" not in shown
    assert "not known" in shown


def test_a_submitted_run_is_resumed_by_another_job(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False)

    def command(**variables: str) -> str:
        write(write_session(path) / "environment.json", {"variables": variables})
        return describe_run._resume(RunRecord(path))

    assert command(SLURM_JOB_ID="7") == f"runner resume={path}"  # typed in a job
    write(write_session(path, begun=False) / "submitted.json", {"job": "7"})
    assert describe_run._resume(RunRecord(path)) == f"runner submit resume={path}"
    assert command(SLURM_JOB_ID="7") == f"runner submit resume={path}"
    assert command() == f"runner resume={path}"  # resumed on this machine since
