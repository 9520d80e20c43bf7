"""What `runner again` says before and after."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from runner.run_dir import environment, provenance, reproduction
from runner.run_dir.json_files import Fields
from tests.runner.written_runs import write_run

CLEAN = {"sha": "a" * 40, "branch": "main", "dirty": False, "diff_sha256": None}


def test_what_was_compared_is_said_where_nothing_differs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    found = reproduction.compare(run, {"git": CLEAN}, {"git": CLEAN})
    said = dict(found.lines())
    assert found.same
    assert said["code"] == "the same: commit aaaaaaaaaa, no uncommitted changes"
    assert said["data"].startswith("not compared")
    assert "work tree" not in said


def test_a_dirty_work_tree_is_said_even_where_it_is_the_same(tmp_path: Path) -> None:
    dirty = {**CLEAN, "dirty": True, "diff_sha256": "x"}
    found = reproduction.compare(write_run(tmp_path / "a"), {"git": dirty}, {"git": dirty})
    said = dict(found.lines())
    assert found.same
    assert "the same uncommitted changes" in said["code"]
    assert "it has uncommitted changes" in said["work tree"]


UNTRACKED = {
    **CLEAN,
    **{"untracked": ["models/foo.py"], "num_untracked": 1, "untracked_sha256": "u"},
}
NEW = {**UNTRACKED, "num_untracked_python": 1, "num_untracked_kept": 1, "untracked_bytes": 99}


@pytest.mark.parametrize("then", [UNTRACKED, NEW])  # as an earlier version recorded it, and as now
def test_an_untracked_module_is_an_uncommitted_change(then: Fields, tmp_path: Path) -> None:
    found = reproduction.compare(write_run(tmp_path / "a"), {"git": then}, {"git": NEW})
    said = dict(found.lines())
    assert found.same
    changes = "uncommitted changes (1 untracked Python file: models/foo.py)"
    assert said["code"] == f"the same: commit aaaaaaaaaa, the same {changes}"
    kept = "the new run keeps them in git.diff"
    assert said["work tree"] == f"it has {changes} beside commit aaaaaaaaaa: {kept}"


def test_tracked_changes_and_untracked_modules_are_said_together(tmp_path: Path) -> None:
    now = {**NEW, "dirty": True, "diff_sha256": "x", "diff_complete": False}
    now |= {"num_untracked_python": 4, "untracked": ["a.py", "b.py", "c.py", "d.py"]}
    found = reproduction.compare(write_run(tmp_path / "a"), {"git": now}, {"git": now})
    said = dict(found.lines())["work tree"]
    assert "(tracked files, and 4 untracked Python files: a.py, b.py, c.py, …)" in said
    assert (
        ", but of tracked files names only (more than 10,000,000 bytes); 1 of 4 untracked" in said
    )


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (CLEAN, "the run has recorded none"),
        ({**NEW, "untracked_sha256": None}, "they are too many"),
    ],
)
def test_untracked_modules_that_were_not_compared_are_not_called_the_same(
    then: Fields, reason: str, tmp_path: Path
) -> None:
    now = {**NEW, "untracked_sha256": then.get("untracked_sha256")}
    found = reproduction.compare(write_run(tmp_path / "a"), {"git": then}, {"git": now})
    said = dict(found.lines())["code"]
    assert "no uncommitted changes of tracked files (1 untracked Python file: models/foo.py" in said
    assert f"not compared: {reason}" in said


def test_a_run_of_two_recipes_and_of_another_folder_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "config.0001.yaml").write_text("name: before\n")
    found = reproduction.compare(run, {"cwd": "/there"}, {"cwd": "/here", "git": {"reason": "no"}})
    assert not found.same
    assert len(found.differences["recipe"]) == 2
    assert dict(found.lines())["code"].startswith("not compared: no")


def test_an_earlier_session_with_other_code_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "environment.0001.json").write_text(json.dumps({"git": {**CLEAN, "sha": "b" * 40}}))
    found = reproduction.compare(run, {"git": CLEAN}, {"git": CLEAN})
    assert not found.same
    said = "an earlier session of the run had other code (environment.0001.json)"
    assert found.differences["code"] == [said]


@pytest.mark.parametrize(("content", "wrong"), [(None, "missing"), ("{", "damaged")])
def test_without_a_record_nothing_of_versions_is_claimed(
    content: str | None, wrong: str, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "a") / "environment.json"
    path.unlink() if content is None else path.write_text(content)
    now = {"git": {**CLEAN, "dirty": True}, "packages": {"torch": "2.13.0"}}
    found = reproduction.compare(path.parent, {}, now)
    assert not found.same
    assert found.lines()[0] == (
        "code",
        f"environment.json is {wrong}: versions and code are not compared, nor is data",
    )
    assert not any("not installed" in sentence for _, sentence in found.lines())
    assert "work tree" in dict(found.lines())


def test_without_git_other_files_are_said_not_to_be_compared(tmp_path: Path) -> None:
    recorded = {"git": {"reason": "no work tree"}, "code": {"wine": "1"}}
    found = reproduction.compare(write_run(tmp_path / "a"), recorded, recorded)
    said = "the same: the Python files of wine; other files are not compared: no work tree"
    assert dict(found.lines())["code"] == said


def test_without_checkpoints_weights_are_not_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    assert reproduction.weights_verdict(*runs) == ""


def test_changed_code_is_found_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "wine_of_runs.py"
    module.write_text("WIDTH = 1\n")
    run = tmp_path / "run"
    run.mkdir()
    unknown = "environment.json is missing: the code of earlier steps is not known"
    assert reproduction.changed_since(run, ["wine_of_runs"]) == [unknown]
    then = {
        "git": {"reason": "no work tree"},
        "runner_git": provenance.runner_checkout(),
        "code": provenance.package_digests(["wine_of_runs"]),
    }
    (run / "environment.json").write_text(json.dumps(then))
    assert reproduction.changed_since(run, ["wine_of_runs"]) == []
    module.write_text("WIDTH = 2\n")
    (said,) = reproduction.changed_since(run, ["wine_of_runs"])
    assert said == "the Python files of the package wine_of_runs differ"
    (run / "environment.json").write_text("{")
    unknown = "environment.json is damaged: the code of earlier steps is not known"
    assert reproduction.changed_since(run, ["wine_of_runs"]) == [unknown]


def test_other_versions_are_named_before_a_resume(tmp_path: Path) -> None:
    then = {
        "git": provenance.git_state("."),
        "runner_git": provenance.runner_checkout(),
        "packages": {**environment.versions(), "torch": "2.0.0"},
        "python": platform.python_version(),
    }
    (tmp_path / "environment.json").write_text(json.dumps(then))
    (said,) = reproduction.changed_since(tmp_path, [])
    assert said == f"torch was 2.0.0, and is {environment.versions()['torch']}"


def test_again_does_not_call_the_code_the_same_where_an_earlier_record_is_damaged(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "a")
    (run / "environment.0001.json").write_text("{")
    found = reproduction.compare(run, {"git": CLEAN}, {"git": CLEAN})
    assert not found.same
    assert "not known" in dict(found.lines())["code"]
