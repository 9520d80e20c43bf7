"""The state of code and data of a run, and how two of them differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.run_dir import provenance, untracked_files


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def code(folder: Path) -> dict[str, object]:
    return {"git": provenance.git_state(folder)}


def test_equal_work_trees_do_not_differ(project: Path) -> None:
    assert provenance.code_differences(code(project), code(project)) == []
    assert provenance.git_state(project)["branch"] == "main"


def test_each_kind_of_change_is_told(project: Path, tmp_path: Path) -> None:
    before = code(project)
    (project / "model.py").write_text("width = 2\n")
    (dirty,) = provenance.code_differences(before, code(project))
    assert "no uncommitted changes then, uncommitted changes" in dirty
    was_dirty = code(project)
    (project / "model.py").write_text("width = 3\n")
    assert len(provenance.code_differences(was_dirty, code(project))) == 1
    git(project, "commit", "-qam", "second")
    (commit,) = provenance.code_differences(before, code(project))
    assert commit.startswith("the project was at commit ")
    now = code(project)
    (project / "new.py").write_text("x = 1\n")
    added = code(project)
    assert provenance.code_differences(now, added) == [
        "the project: no untracked Python files then, 1 untracked Python file: new.py now"
    ]
    assert provenance.code_differences(added, code(project)) == []
    (project / "new.py").write_text("x = 2\n")
    assert provenance.code_differences(added, code(project)) == [
        "the project: the contents differ of 1 untracked Python file: new.py"
    ]
    (project / "new.py").unlink()
    (project / "new.txt").write_text("no code\n")
    assert provenance.code_differences(now, code(project)) == []
    (lost,) = provenance.code_differences(now, {"git": {"reason": "git is not installed"}})
    assert "has no git state now" in lost


def test_what_runs_have_written_is_no_untracked_file_of_the_project(project: Path) -> None:
    for name in (
        *("runs/.lock", "runs/one/overrides.yaml", "runs/one/checkpoints/checkpoint_0/model.bin"),
        *("runs/sweep-1/sweep.json", "runs/sweep-1/0000/.attempt-1/config.yaml", "runs/notes.txt"),
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    found = provenance.git_state(project)
    assert (found["untracked"], found["num_untracked"]) == (["runs/notes.txt"], 1)


def test_the_patch_applies_and_a_large_one_is_only_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "model.py").write_text("width = 2\n")
    patch = tmp_path / "git.diff"
    found = provenance.git_state(project, patch)
    assert found["diff_complete"]
    git(project, "checkout", "-q", ".")
    git(project, "apply", str(patch))
    assert (project / "model.py").read_text() == "width = 2\n"
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 20)
    found = provenance.git_state(project, patch)
    assert not found["diff_complete"]
    assert "model.py |" in patch.read_text()
    assert "names only" in provenance.described_git(found)


def test_the_patch_of_a_run_has_its_untracked_python_files(project: Path, tmp_path: Path) -> None:
    git(project, "config", "diff.noprefix", "true")  # a user's own taste
    git(project, "config", "diff.relative", "true")
    (project / ".gitignore").write_text("secret.py\n")
    git(project, "add", ".gitignore")
    git(project, "commit", "-qm", "second")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    (project / "models").mkdir()
    (project / "models" / "foo.py").write_text("depth = 3\n")
    (project / "secret.py").write_text("token = 1\n")
    (project / "notes.txt").write_text("no code\n")
    (project / "model.py").write_text("width = 2\n")
    index = (project / ".git" / "index").read_bytes()
    patch = tmp_path / "git.diff"
    found = provenance.git_state(project / "models", patch)
    assert (project / ".git" / "index").read_bytes() == index
    assert found["untracked"] == ["models/foo.py", "notes.txt"]
    assert patch.stat().st_size == found["diff_bytes"] + found["untracked_bytes"]
    git(clone, "apply", str(patch))
    assert (clone / "models" / "foo.py").read_text() == "depth = 3\n"
    assert (clone / "model.py").read_text() == "width = 2\n"
    assert not (clone / "secret.py").exists()
    assert not (clone / "notes.txt").exists()
    assert provenance.code_id(code(clone)) == provenance.code_id({"git": found})
    said = provenance.described_git(found)
    assert "(git.diff), 1 untracked Python file: models/foo.py (git.diff), 1 other" in said
    assert "git.diff" not in provenance.described_git(found, kept=False)


def test_a_file_that_is_no_longer_tracked_is_in_the_patch(project: Path, tmp_path: Path) -> None:
    clone, patch = tmp_path / "clone", tmp_path / "git.diff"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    git(project, "rm", "-q", "--cached", "model.py")
    (project / "model.py").write_text("width = 4\n")
    provenance.git_state(project, patch)
    git(clone, "apply", str(patch))
    assert (clone / "model.py").read_text() == "width = 4\n"


def test_without_room_in_the_patch_it_is_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "a.py").write_text("x = 1\n" * 20)
    (project / "b.py").write_text("y = 1\n")
    monkeypatch.setattr(untracked_files, "MOST_BYTES", 50)
    found = provenance.git_state(project, tmp_path / "git.diff")
    assert (found["num_untracked_kept"], found["num_untracked_python"]) == (1, 2)
    (said,) = provenance.not_kept(found)
    assert said.startswith("1 of 2 untracked Python files (limits: 50 bytes in all")
    assert "a.py, b.py (1 of them in git.diff)" in provenance.described_git(found)


def test_records_of_earlier_versions_are_described() -> None:
    old = {"sha": "a" * 40, "branch": "main", "dirty": False, "untracked_sha256": "u" * 64}
    listed = {**old, "untracked": ["a.txt", "new.py"], "num_untracked": 2}
    said = "aaaaaaaaaa on main, 1 untracked Python file: new.py (not kept), 1 other untracked files"
    assert provenance.described_git(listed) == said
    assert provenance.not_kept(listed) == []
    cut = {**old, "untracked": ["a.txt"], "num_untracked": 300}
    assert provenance.uncommitted(cut) == "uncommitted changes (untracked Python files)"
    new = {**listed, "num_untracked_python": 1, "num_untracked_kept": 1, "untracked_bytes": 99}
    assert provenance.code_differences({"git": listed}, {"git": new}) == []
    assert provenance.code_id({"git": listed}) == provenance.code_id({"git": new})


def test_no_commit_no_work_tree_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "no git work tree" in provenance.git_state(tmp_path)["reason"]
    git(tmp_path, "init", "-q")
    found = provenance.git_state(tmp_path)
    assert (found["sha"], found["dirty"]) == (None, False)
    assert provenance.described_git(found).startswith("no commit on")
    monkeypatch.setattr(provenance, "GIT", ("no-such-program",))
    assert provenance.git_state(tmp_path) == {"reason": "git is not installed"}
    assert provenance.described_git(None) == "no git work tree"


def test_packages_are_told_apart_by_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ownpackage_p"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "ownmodule_p.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("ownpackage_p", "ownmodule_p", "nowhere_p")
    before = provenance.package_digests(names)
    assert before["nowhere_p"] is None
    assert before["ownpackage_p"]
    (package / "inner.py").write_text("y = 2\n")
    after = provenance.package_digests(names)
    differences = provenance.code_differences({"code": before}, {"code": after})
    assert differences == ["the Python files of the package ownpackage_p differ"]
    monkeypatch.setattr(provenance, "MOST_SOURCES", 1)
    assert provenance.package_digests(names)["ownpackage_p"] is None
    assert "ownpackage_p" not in sys.modules


def test_versions_and_machine_are_compared() -> None:
    then = {"packages": {"torch": "2.12"}, "python": "3.11", "cpu_count": 8}
    now = {"packages": {"torch": "2.13", "numpy": "2"}, "python": "3.11", "cpu_count": 2}
    assert provenance.machine_differences(then, now) == [
        "torch was 2.12, and is 2.13",
        "numpy was not installed, and is 2",
        "the number of CPUs was 8, and is 2",
    ]


def test_equal_code_has_one_short_name() -> None:
    state = {"sha": "a" * 40, "branch": "main", "dirty": True, "diff_sha256": "d" * 64}
    recorded = {"git": state, "code": {"wine": "1"}}
    name = provenance.code_id(recorded)
    assert name.startswith("aaaaaaaa-")
    assert provenance.code_id({**recorded, "git": {**state, "branch": "side"}}) == name
    assert provenance.code_id({**recorded, "git": {**state, "diff_sha256": "e"}}) != name
    assert provenance.code_id({**recorded, "code": {"wine": "2"}}) != name
    assert len(provenance.code_id({"git": {"reason": "no git"}, "code": {"wine": "1"}})) == 8
    assert provenance.code_id({"git": None}) == ""
