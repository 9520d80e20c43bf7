"""A run that is resumed with other code keeps the record of the code before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.run_dir import atomic_update, earlier_sessions
from runner.run_dir.record import RunRecord
from tests.runner.written_runs import write_run

GIT = {"sha": "a" * 40, "branch": "main", "dirty": False}
DIRTY = {**GIT, "dirty": True, "diff_sha256": "d" * 64}
STARTED = iter(range(1000))


def session(run_dir: Path, diff: str = "", **recorded: Any) -> None:
    """Commit what a session records of its code."""
    staged = atomic_update.stage(run_dir)
    (staged / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
    found = {"started": next(STARTED), "packages": {"torch": "2.13.0"}, "git": GIT, **recorded}
    (staged / "environment.json").write_text(json.dumps(found))
    if diff:
        (staged / "git.diff").write_text(diff)
    atomic_update.commit(staged)


def names(run_dir: Path) -> list[str]:
    return [name for name, _ in earlier_sessions.kept(run_dir)]


def newest(run_dir: Path) -> Any:
    return json.loads((run_dir / "environment.json").read_text())


def a_run(folder: Path, metrics: int = 1) -> Path:
    return write_run(folder / "run", metrics=metrics, summary=metrics > 0, git=GIT)


def test_the_code_of_each_session_is_kept_under_a_name(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir, code={"wine": "1"}, git=DIRTY, diff="+first")
    session(run_dir, code={"wine": "1"}, git=DIRTY, diff="+first")  # the same code
    assert names(run_dir) == ["environment.0001.json"]
    session(run_dir, code={"wine": "2"})
    assert names(run_dir) == ["environment.0001.json", "environment.0002.json"]
    assert (run_dir / "git.0002.diff").read_text() == "+first"
    assert not (run_dir / "git.0001.diff").exists()
    assert dict(earlier_sessions.kept(run_dir))["environment.0002.json"]["code"] == {"wine": "1"}


def test_the_record_of_data_is_kept_where_a_resume_has_other_files(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir)  # the first one has recorded no data
    first = {"path": "/d.csv", "files": 1, "bytes": 9, "newest": 1.0, "complete": True}
    session(run_dir, data={"data.path": first})
    assert names(run_dir) == []
    session(run_dir, data={"data.path": {**first, "newest": 2.5}})
    assert names(run_dir) == ["environment.0001.json"]
    assert earlier_sessions.notes(run_dir, newest(run_dir)) == {
        "data": ["an earlier session of the run had other data (environment.0001.json)"]
    }
    assert " after " not in RunRecord(run_dir).data_files  # it is said, and groups no runs
    session(run_dir, data={"data.path": {**first, "bytes": 12}})
    run = RunRecord(run_dir)
    assert " after " in run.data_files
    assert " after " not in run.code


def test_a_clean_work_tree_leaves_no_patch(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir, git=DIRTY, diff="+first")
    assert (run_dir / "git.diff").read_text() == "+first"
    session(run_dir)
    assert not (run_dir / "git.diff").exists()
    staged = atomic_update.stage(run_dir)  # files alone that say nothing of code
    (staged / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
    (run_dir / "git.diff").write_text("+kept")
    atomic_update.commit(staged)
    assert (run_dir / "git.diff").exists()


def test_a_run_that_was_never_trained_has_no_session_to_keep(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, metrics=0)
    session(run_dir, code={"wine": "1"})
    session(run_dir, code={"wine": "2"})
    assert names(run_dir) == []


def test_a_commit_that_was_killed_keeps_a_session_once(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir, git=DIRTY, diff="+first")
    (run_dir / "environment.0001.json").unlink()  # it was killed between the two names
    for name in ("git.0001.diff", "git.0002.diff"):
        (run_dir / name).write_text("+torn")
    session(run_dir)
    assert names(run_dir) == ["environment.0001.json"]
    assert (run_dir / "git.0001.diff").read_text() == "+first"
    staged = run_dir / ".attempt-1"
    staged.mkdir()
    (run_dir / "environment.0002.json").write_bytes((run_dir / "environment.json").read_bytes())
    (staged / "environment.json").write_text(json.dumps({"packages": {"torch": "2.12.0"}}))
    earlier_sessions.keep(run_dir, staged)
    assert names(run_dir) == ["environment.0001.json", "environment.0002.json"]


def test_earlier_code_and_versions_are_said_unless_they_are_those_of_now(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    assert earlier_sessions.notes(run_dir, newest(run_dir)) == {}
    session(run_dir, packages={"torch": "2.12.0"})
    assert earlier_sessions.notes(run_dir, newest(run_dir)) == {
        "versions": ["an earlier session of the run had other versions (environment.0001.json)"]
    }
    session(run_dir, packages={"torch": "2.13.0"}, git=DIRTY)
    found = earlier_sessions.notes(run_dir, newest(run_dir))
    assert found["code"] == [
        f"an earlier session of the run had other code (environment.000{n}.json)" for n in (1, 2)
    ]
    assert "environment.0002.json" in found["versions"][0]
    (run_dir / "environment.0001.json").write_text("{")
    assert "damaged" in earlier_sessions.notes(run_dir, newest(run_dir))["code"][0]


@pytest.mark.parametrize("content", [None, '{"started": 1, "git": {"sh', "{}"])
@pytest.mark.parametrize("lost", ["", "metrics.jsonl"])
def test_of_a_damaged_record_what_is_left_is_kept(
    content: str | None, lost: str, tmp_path: Path
) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir, git=DIRTY, diff="+first")
    for name in ("environment.0001.json", lost):
        (run_dir / name).unlink() if name else None
    path = run_dir / "environment.json"
    path.unlink() if content is None else path.write_text(content)
    session(run_dir, git={**DIRTY, "diff_sha256": "e" * 64}, diff="+second")
    assert names(run_dir) == ["environment.0001.json"]
    assert (run_dir / "environment.0001.json").read_text().strip() == (content or "{}")
    assert (run_dir / "git.0001.diff").read_text() == "+first"
    assert (run_dir / "git.diff").read_text() == "+second"
    assert "not known" in earlier_sessions.notes(run_dir, newest(run_dir))["code"][0]
    found = RunRecord(run_dir)
    assert found.code.startswith("aaaaaaaa-")
    assert found.code.endswith(" after unknown")
    assert any("environment.0001.json" in problem for problem in found.problems)


def test_a_record_that_is_lost_twice_is_kept_twice_and_a_killed_commit_keeps_it_once(
    tmp_path: Path,
) -> None:
    run_dir = a_run(tmp_path)
    for diff in ("+first", "+second"):
        (run_dir / "environment.json").unlink()
        (run_dir / "git.diff").write_text(diff)
        staged = atomic_update.stage(run_dir)
        (staged / "environment.json").write_text(json.dumps({"git": GIT}))
        earlier_sessions.keep(run_dir, staged)  # the commit is killed behind it
        atomic_update.discard(staged)
        session(run_dir)
    assert names(run_dir) == ["environment.0001.json", "environment.0002.json"]
    kept = [(run_dir / f"git.000{n}.diff").read_text() for n in (1, 2)]
    assert kept == ["+first", "+second"]


def test_without_the_newest_record_no_other_code_is_claimed(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    session(run_dir, git=DIRTY)
    (said,) = earlier_sessions.notes(run_dir, {})["code"]
    assert "other code" not in said
    assert "environment.0001.json" in said
