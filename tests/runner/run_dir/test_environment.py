"""Versions, machine and git state of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.run_dir import data_files, environment


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_environment_tells_versions_machine_and_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    project, run_dir = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    run_dir.mkdir()
    git(project, "init", "-q")
    (project / "model.py").write_text("width = 1\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "first")
    monkeypatch.chdir(project)
    environment.write_environment(run_dir)
    found = json.loads((run_dir / "environment.json").read_text())
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["device"]["count"] >= 1
    assert re.fullmatch("[0-9a-f]{40}", found["git"]["sha"])
    assert not found["git"]["dirty"]
    assert not (run_dir / "git.diff").exists()

    (project / "model.py").write_text("width = 2\n")
    (project / "new.py").write_text("")
    environment.write_environment(run_dir)
    found = json.loads((run_dir / "environment.json").read_text())
    assert found["git"]["dirty"]
    assert found["git"]["untracked"] == ["new.py"]
    assert "+width = 2" in (run_dir / "git.diff").read_text()
    assert "b/new.py" in (run_dir / "git.diff").read_text()


def test_no_password_of_the_command_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    word = "hydra.sweeper.storage=postgresql://user:{}@host/db"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "runner", word.format("secret")])
    assert environment.describe()["command"] == ["python", "-m", "runner", word.format("***")]


def test_files_that_a_factory_has_written_are_noted_as_its_data(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run_dir.mkdir()
    (data / "a.csv").write_text("1,2")
    node = {"name": "csv", "path": str(data)}
    environment.note_data(run_dir, node)  # of a run without a record
    assert list(run_dir.iterdir()) == []
    first = environment.write_environment(run_dir, node)
    (data / "cache.pt").write_text("3")
    environment.note_data(run_dir, node)
    found = json.loads((run_dir / "environment.json").read_text())
    assert found == {**first, "data": data_files.find(node)}
    assert found["data"]["data.path"]["files"] == 2


def test_outside_of_git_there_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "no git work tree" in str(environment.write_environment(tmp_path)["git"])
