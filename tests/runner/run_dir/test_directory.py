"""Run directories: claimed once, described, found again; metrics without doubles."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory as checkpoints
from accel.errors import ConfigError
from runner.config.schema import Recipe
from runner.run_dir import directory
from runner.run_dir.job import Job


def new_run(folder: Path, name: str = "digits", stamp: str | None = None, **fields: Any) -> Path:
    path = directory.claim(folder, name)
    if stamp is not None:
        path = path.rename(path.with_name(stamp))
    Job(path, cwd=str(folder)).save(replace(Recipe(name=name), **fields))
    return path


def add_checkpoint(folder: Path, number: int) -> Path:
    path = folder / f"checkpoint_{number}"
    staged = checkpoints.stage(path)
    (staged / "model.safetensors").write_bytes(b"weights")
    checkpoints.seal(staged, {}, {"step": number})
    checkpoints.publish(staged, path)
    return path


# -- claim ---------------------------------------------------------------------------------


def test_a_directory_is_claimed_by_one_run(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: directory.claim(tmp_path, "digits"), range(32)))
    assert len(set(paths)) == 32
    for path in paths:
        assert path.parent == tmp_path / "digits"
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", path.name)
        assert path.is_dir()


def test_a_taken_name_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["0000", "0000", "0000", "1111"])
    monkeypatch.setattr(directory.secrets, "token_hex", lambda size: next(tokens))
    monkeypatch.setattr(directory, "_stamp", lambda: "20260101-000000")
    names = [directory.claim(tmp_path, "digits").name for _ in range(2)]
    assert names == ["20260101-000000-0000", "20260101-000000-1111"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name of one folder"):
        directory.claim(tmp_path, name)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        directory.claim(tmp_path / "file", "digits")


# -- find ----------------------------------------------------------------------------------


def test_the_newest_run_of_a_name(tmp_path: Path) -> None:
    assert directory.find_newest(tmp_path, "digits") is None
    new_run(tmp_path, stamp="20260101-000001-ffff")
    newest = new_run(tmp_path, stamp="20260101-000002-0000")
    new_run(tmp_path, name="other", stamp="20270101-000000-0000")
    directory.claim(tmp_path, "digits")  # claimed, and cut off before its recipe was written
    assert directory.find_newest(tmp_path, "digits") == newest


def test_two_runs_of_one_second_are_told_apart_by_their_recipes(tmp_path: Path) -> None:
    later, earlier = (new_run(tmp_path, stamp=f"20260101-000000-{i}000") for i in range(2))
    for age, path in enumerate((earlier, later)):
        os.utime(path / "config.yaml", (1e9 + age, 1e9 + age))
    assert directory.find_newest(tmp_path, "digits") == later


def test_checkpoints_lie_where_the_recipe_says(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    assert directory.newest_checkpoint(run_dir) is None
    path = add_checkpoint(run_dir / "checkpoints", 3)
    assert directory.newest_checkpoint(run_dir) == path
    elsewhere = Recipe()
    elsewhere.checkpoint.project.set_directories("states")
    other = new_run(tmp_path, name="other", checkpoint=elsewhere.checkpoint)
    assert directory.checkpoint_folder(other) == tmp_path / "states" / "checkpoints"


# -- environment ---------------------------------------------------------------------------


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
    directory.write_environment(run_dir)
    found = json.loads((run_dir / "environment.json").read_text())
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["device"]["count"] >= 1
    assert re.fullmatch("[0-9a-f]{40}", found["git"]["sha"])
    assert not found["git"]["dirty"]
    assert not (run_dir / "git.diff").exists()

    (project / "model.py").write_text("width = 2\n")
    (project / "new.py").write_text("")
    directory.write_environment(run_dir)
    found = json.loads((run_dir / "environment.json").read_text())
    assert found["git"]["dirty"]
    assert found["git"]["untracked"] == ["new.py"]
    assert "+width = 2" in (run_dir / "git.diff").read_text()


def test_outside_of_git_there_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert directory.write_environment(tmp_path)["git"] is None


# -- metrics and summary -------------------------------------------------------------------


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_lines_of_strict_json(tmp_path: Path) -> None:
    with directory.MetricsFile(tmp_path) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]
        metrics.write({"step": 2, "loss": float("nan"), "norm": float("-inf")})
    metrics.close()
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": "NaN", "norm": "-Infinity"}
    assert float(read_metrics(tmp_path)[1]["norm"]) == float("-inf")


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    with directory.MetricsFile(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step, "run": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with directory.MetricsFile(tmp_path, step=3) as metrics:
        metrics.write({"step": 4, "run": 2})
    found = [(record["step"], record["run"]) for record in read_metrics(tmp_path)]
    assert found == [(1, 1), (2, 1), (3, 1), (4, 2)]
    with directory.MetricsFile(tmp_path):
        assert read_metrics(tmp_path) == []


def test_the_summary_is_written_in_one_piece(tmp_path: Path) -> None:
    directory.write_summary(tmp_path, {"best": float("inf"), "path": tmp_path, "steps": (1, 2)})
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"best": "Infinity", "path": str(tmp_path), "steps": [1, 2]}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
