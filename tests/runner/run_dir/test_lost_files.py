"""Files of a run that are lost or truncated are said; what a run never wrote is no damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.run_dir.record import RunRecord
from tests.runner.written_runs import STARTED, write, write_run

GIT = {"sha": "a" * 40, "branch": "main", "dirty": True, "diff_sha256": "d", "diff_bytes": 6}


def a_run(folder: Path, values: dict[str, Any] | None = None, **given: Any) -> Path:
    run_dir = write_run(folder / "run", values, git=GIT, **given)
    (run_dir / "git.diff").write_text("+first")
    environment = json.loads((run_dir / "environment.json").read_text())
    write(run_dir / "environment.0001.json", {**environment, "cwd": "/other"})
    (run_dir / "git.0001.diff").write_text("+first")
    return run_dir


def change(run_dir: Path, name: str, **values: Any) -> None:
    content = json.loads((run_dir / name).read_text())
    write(run_dir / name, {**content, **values})


def cut_lines(run_dir: Path, number: int) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:number]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "environment.json").unlink(), "environment.json is missing"),
        (lambda run: (run / "environment.json").write_text("{}"), "environment.json records no"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (
            lambda run: cut_lines(run, 2),
            "metrics.jsonl ends at step 10, and summary.json at step 20: its end is lost",
        ),
        (lambda run: (run / "environment.0001.json").write_text("{"), "environment.0001.json is d"),
        (lambda run: (run / "git.diff").write_text("+fi"), "git.diff has 3 bytes, not 6"),
        (lambda run: (run / "git.diff").unlink(), "git.diff is missing"),
        (lambda run: (run / "git.0001.diff").write_text("+"), "git.0001.diff has 1 bytes, not 6"),
    ],
)
def test_what_is_lost_is_said(damage: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    assert RunRecord(run_dir).problems == []
    damage(run_dir)
    (found,) = RunRecord(run_dir).problems
    assert found.startswith(said)


def test_a_test_at_the_end_has_a_line_whatever_the_log_points(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, {"trainer.log_every": 1000})
    change(run_dir, "summary.json", step=21)
    assert RunRecord(run_dir).problems == []
    change(run_dir, "summary.json", weights_step=10)
    (found,) = RunRecord(run_dir).problems
    assert found.startswith("metrics.jsonl ends at step 20, and summary.json at step 21")


@pytest.mark.parametrize(
    ("values", "step", "earlier"),
    [
        ({"trainer.log_every": 10}, 29, False),  # stopped between two log points
        ({"trainer.log_every": 1000}, 999, False),
        ({"trainer.log_every": 1}, 900, True),  # of an earlier session, which had 1000
    ],
)
def test_a_run_that_wrote_no_later_record_is_whole(
    values: dict[str, Any], step: int, earlier: bool, tmp_path: Path
) -> None:
    run_dir = a_run(tmp_path, values, stopped="signal", complete=False)
    change(run_dir, "summary.json", step=step)
    if earlier:
        shutil.copy(run_dir / "config.yaml", run_dir / "config.0001.yaml")
    assert RunRecord(run_dir).problems == []


def test_a_run_that_was_stopped_before_its_first_log_point_is_whole(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, stopped="signal", complete=False, best=None)
    (run_dir / "metrics.jsonl").write_text("")
    assert RunRecord(run_dir).problems == []


def test_a_run_that_has_not_begun_lacks_nothing(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", summary=False, metrics=0)
    (run_dir / "environment.json").unlink()
    write(run_dir / "slurm.json", {"job": "7", "time": STARTED})
    run = RunRecord(run_dir)
    assert (run.status, run.problems) == ("submitted", [])


def test_of_a_patch_that_was_too_large_only_names_are_recorded(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    change(run_dir, "environment.json", git={**GIT, "diff_complete": False, "diff_bytes": 10**7})
    assert RunRecord(run_dir).problems == []


def test_a_patch_of_untracked_files_alone_is_missed_too(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    git = {"sha": "a" * 40, "dirty": False, "untracked_bytes": 6}
    change(run_dir, "environment.json", git=git)
    assert RunRecord(run_dir).problems == []
    change(run_dir, "environment.json", git={**GIT, "untracked_bytes": 6})
    assert RunRecord(run_dir).problems == ["git.diff has 6 bytes, not 12"]
    change(run_dir, "environment.json", git=git)
    (run_dir / "git.diff").unlink()
    assert RunRecord(run_dir).problems == ["git.diff is missing"]


def test_a_damaged_line_is_said_once_by_its_number(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, metrics=18)
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[18] = lines[18][:20] + "\n"
    path.write_text("".join(lines))
    run = RunRecord(run_dir)
    assert run.problems == ["metrics.jsonl is damaged at line 19"]
    assert list(run.records())
    assert run.problems == ["metrics.jsonl is damaged at line 19"]
