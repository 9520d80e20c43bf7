"""A run records the code, versions and data that it was made from, and tells what differs (R8)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from runner.runs import environment, provenance, sessions
from tests.helpers import git
from tests.runner.written_runs import write, write_run, write_session

CLEAN = {"sha": "a" * 40, "branch": "main", "dirty": False, "diff_sha256": None}
FILES = {
    "plain.py": b"x = 1\n",
    "deep/er/module.py": b"x = 1\n\ny = 2\n",
    "no_newline.py": b"x = 1",
    'quo"te\\.py': b"x = 1\n",
    "f\u00fcr.py": "gr\u00fc\u00dfe = 1\n".encode(),
    "byte\udcff.py": b"x = '\xff'\n",
    "windows.py": b"x = 1\r\ny = 2\r\n",
    "looks_like_a_patch.py": b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-- \ndiff --git a/x b/x\n",
}


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


# -- git -----------------------------------------------------------------------------------


def test_each_kind_of_change_is_told(project: Path) -> None:
    before = code(project)
    assert provenance.code_differences(before, code(project)) == []
    (project / "model.py").write_text("width = 2\n")
    dirty = code(project)
    assert provenance.code_differences(before, dirty) == [
        "the project had no uncommitted changes, and has uncommitted changes"
    ]
    (project / "model.py").write_text("width = 3\n")
    assert len(provenance.code_differences(dirty, code(project))) == 1
    git(project, "commit", "-qam", "second")
    (commit,) = provenance.code_differences(before, code(project))
    assert commit.startswith("the project was at commit ")
    now = code(project)
    (project / "new.py").write_text("x = 1\n")
    added = code(project)
    changes = "uncommitted changes (1 untracked Python file: new.py)"
    assert provenance.code_differences(now, added) == [
        f"the project had no uncommitted changes, and has {changes}"
    ]
    (project / "new.py").write_text("x = 2\n")
    assert provenance.code_differences(added, code(project)) == [
        f"the project had {changes}, and has {changes} of other contents"
    ]
    (project / "new.py").unlink()
    (project / "new.txt").write_text("no code\n")
    assert provenance.code_differences(now, code(project)) == []
    (lost,) = provenance.code_differences(now, {"git": {"reason": "git is not installed"}})
    assert "has no git state now" in lost


def test_the_patch_of_a_run_makes_its_code_again(project: Path, tmp_path: Path) -> None:
    git(project, "config", "diff.noprefix", "true")  # a user's own taste
    git(project, "config", "diff.relative", "true")
    (project / ".gitignore").write_text("secret.py\n")
    git(project, "add", ".gitignore")
    git(project, "commit", "-qm", "second")
    clone, patch = tmp_path / "clone", tmp_path / "git.diff"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    written = {"secret.py": "token = 1\n", "notes.txt": "no code\n", "model.py": "width = 2\n"}
    for name, text in written.items():
        (project / name).write_text(text)
    for name, content in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(content)
    (project / "binary.py").write_bytes(b"\0\n")
    index = (project / ".git" / "index").read_bytes()
    found = provenance.git_state(project / "deep", patch)
    assert (project / ".git" / "index").read_bytes() == index
    assert set(found["untracked"]) == {*FILES, "binary.py"}
    git(clone, "apply", str(patch))
    assert {name: (clone / name).read_bytes() for name in FILES} == FILES
    assert (clone / "model.py").read_text() == "width = 2\n"
    assert not {"secret.py", "notes.txt"} & {path.name for path in clone.iterdir()}
    assert "9 untracked Python files" in provenance.described_git(found)


def test_a_patch_that_is_too_large_is_said_to_be_left_out(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "model.py").write_text("width = 2\n")
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 20)
    found = provenance.git_state(project, tmp_path / "git.diff")
    assert not (tmp_path / "git.diff").exists()
    assert "not kept: more than 20 bytes" in provenance.described_git(found)


def test_no_commit_no_work_tree_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "no git work tree" in provenance.git_state(tmp_path)["reason"]
    git(tmp_path, "init", "-q")
    found = provenance.git_state(tmp_path)
    assert (found["sha"], found["dirty"]) == (None, False)
    assert provenance.described_git(found).startswith("no commit on")
    monkeypatch.setattr(provenance, "GIT", ("no-such-program",))
    assert provenance.git_state(tmp_path) == {"reason": "git is not installed"}


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
    (package / "inner.py").write_text("y = 2\n")
    differences = provenance.code_differences(
        {"code": before}, {"code": provenance.package_digests(names)}
    )
    assert differences == ["the Python files of the package ownpackage_p differ"]
    monkeypatch.setattr(provenance, "MOST_SOURCES", 1)
    assert provenance.package_digests(names)["ownpackage_p"] is None
    assert "ownpackage_p" not in sys.modules


# -- environment ---------------------------------------------------------------------------


def test_the_environment_tells_versions_machine_and_git(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(project)
    found, patch = environment.describe(), tmp_path / "git.diff"
    packages, device, git_ = (dict(found[key]) for key in ("packages", "device", "git"))  # type: ignore[call-overload]
    assert packages["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert device["count"] >= 1
    assert re.fullmatch("[0-9a-f]{40}", git_["sha"])
    (project / "model.py").write_text("width = 2\n")
    environment.describe(None, patch)
    assert "+width = 2" in patch.read_text()


def test_no_password_of_the_command_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    word = "hydra.sweeper.storage=postgresql://user:{}@host/db"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "runner", word.format("secret")])
    assert environment.describe()["command"] == ["python", "-m", "runner", word.format("***")]


def test_data_that_a_factory_is_given_is_compared_by_number_size_and_time(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("1,2\n")
    node = {"name": "csv", "path": str(tmp_path / "d"), "cache": str(tmp_path / "c.bin"), "k": [3]}
    before = {"data": environment.data_files(node)}
    assert list(before["data"]) == ["data.path"]
    (tmp_path / "c.bin").write_text("what the factory has written is no difference")
    assert environment.data_differences(before, {"data": environment.data_files(node)}) == []
    (tmp_path / "d" / "b.csv").write_text("3,4\n")
    now = {"data": environment.data_files(node)}
    (said,) = environment.data_differences(before, now)
    assert said.startswith("data.path: 1 file of 4 bytes, newest of ")
    assert "then, 2 files of 8 bytes" in said
    assert environment.data_differences(before, now, ["data.path"]) == []
    assert "is not there" in environment.data_differences(before, {"data": {}})[0]


def test_versions_and_machine_are_compared(tmp_path: Path) -> None:
    then = {"packages": {"torch": "2.12"}, "python": "3.11", "cpu": "A"}
    now = {"packages": {"torch": "2.13", "numpy": "2"}, "python": "3.11", "cpu": "B"}
    assert environment.compare(tmp_path, then, now)["versions"] == [
        "torch was 2.12, and is 2.13",
        "numpy was not installed, and is 2",
        "the CPU was A, and is B",
    ]


# -- sessions ------------------------------------------------------------------------------


def test_sessions_of_other_code_are_found(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", git=CLEAN)
    for is_dirty in (True, True, False):
        found = json.loads((sessions.of_run(run_dir)[0] / "environment.json").read_text())
        git = {**CLEAN, "dirty": True, "diff_sha256": "d"} if is_dirty else CLEAN
        write(write_session(run_dir) / "environment.json", {**found, "git": git})
    assert [path.name for path in environment.earlier_environments(run_dir)] == ["0001", "0003"]
    found = environment.compare(run_dir, {"git": CLEAN}, {"git": CLEAN})
    assert found["code"] == ["sessions 0001, 0003 had other code, versions or data"]


# -- a run and this process ----------------------------------------------------------------


def test_what_differs_is_said_by_subject(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert not any(environment.compare(run, {"git": CLEAN}, {"git": CLEAN}).values())
    with (write_session(run) / "config.yaml").open("a") as file:
        file.write("# other\n")
    found = environment.compare(run, {"git": CLEAN, "cwd": "/there"}, {"git": CLEAN, "cwd": "/"})
    first, second = found["recipe"]
    assert first == "sessions 0001 had another recipe"
    assert "/there" in second


@pytest.mark.parametrize("content", [None, "{"])
def test_without_a_record_nothing_is_claimed(content: str | None, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    file = sessions.of_run(run)[0] / "environment.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    told = "environment.json is missing or damaged: code, versions and data are not compared"
    assert environment.compare(run, environment.recorded(run), {}) == {"code": [told]}
