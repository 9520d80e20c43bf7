"""What is not as it was when a run was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.inference import not_as_trained
from runner.run_dir import provenance
from runner.run_dir.reproduction import recorded

FILES = {"path": "/d.csv", "files": 1, "bytes": 9, "newest": 1.0, "complete": True}


def record(run_dir: Path, **content: object) -> None:
    (run_dir / "environment.json").write_text(json.dumps(content))


def other_code(run_dir: Path) -> list[str]:
    then = recorded(run_dir)
    return not_as_trained.other_code(then, not_as_trained.code_now(then))


def test_a_changed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ownpkg"
    package.mkdir()
    (package / "__init__.py").write_text("width = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record(tmp_path, code=provenance.package_digests(["ownpkg"]))
    assert other_code(tmp_path) == []
    before = not_as_trained.code_now(recorded(tmp_path))
    (package / "__init__.py").write_text("width = 2\n")
    said = "code: not as it was trained with: the Python files of the package ownpkg differ"
    assert other_code(tmp_path) == [said]
    assert before.keys() == {"ownpkg"}
    assert before != not_as_trained.code_now(recorded(tmp_path))


def test_git_tells_of_packages_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = {"sha": "a" * 40, "dirty": False}
    monkeypatch.setattr(provenance, "git_state", lambda folder: {**git, "sha": "b" * 40})
    record(tmp_path, code={"ownpkg": None}, git=git)
    (line,) = other_code(tmp_path)
    assert "the project was at commit aaaaaaaaaa, and is at bbbbbbbbbb" in line
    record(tmp_path, git=git)  # no code of the project's: a commit says nothing
    assert other_code(tmp_path) == []


def test_data_that_the_command_has_changed_is_not_compared(tmp_path: Path) -> None:
    record(tmp_path, data={"data.path": FILES})
    now = {"data.path": {**FILES, "bytes": 12}}
    (line,) = not_as_trained.other_data(recorded(tmp_path), now, ["trainer.seed"])
    assert line.startswith("data: not as it was trained with: data.path: 1 file of 9 bytes then")
    assert not_as_trained.other_data(recorded(tmp_path), now, ["data.path"]) == []
    assert not_as_trained.other_data(recorded(tmp_path), {"data.path": FILES}, []) == []


def test_a_run_without_a_record_says_nothing(tmp_path: Path) -> None:
    assert other_code(tmp_path) == []
    assert not_as_trained.code_now(recorded(tmp_path)) == {}
    assert not_as_trained.other_data(recorded(tmp_path), {"data.path": FILES}, []) == []
