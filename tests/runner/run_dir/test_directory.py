"""Run directories: claimed once, described, found again; metrics without doubles."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.recipe.schema import Recipe
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
    monkeypatch.setattr(directory, "stamp", lambda: "20260101-000000")
    names = [directory.claim(tmp_path, "digits").name for _ in range(2)]
    assert names == ["20260101-000000-0000", "20260101-000000-1111"]


@pytest.mark.parametrize("inside", ["logs/own", "checkpoints"])
def test_no_run_is_made_inside_of_another(tmp_path: Path, inside: str) -> None:
    run = new_run(tmp_path)
    with pytest.raises(directory.UsedError, match=re.escape(f"inside of a run's ({run})")) as told:
        directory.claim_chosen(run / inside)
    assert f"run_dir={run}-2." in str(told.value)
    assert not (run / inside).exists()
    assert directory.claim_chosen(run / ".." / "mine").is_dir()


@pytest.mark.parametrize("folder", ["0003", "0003/mine", ".mine"])
def test_no_run_is_made_among_the_jobs_of_a_sweep(tmp_path: Path, folder: str) -> None:
    described = {"digest": "0", "config_name": "config", "jobs": []}
    (tmp_path / "sweep.json").write_text(json.dumps(described))  # before its first job
    with pytest.raises(directory.UsedError, match="inside of a sweep's"):
        directory.claim_chosen(tmp_path / folder)
    assert directory.claim_chosen(tmp_path / "mine").is_dir()  # as with sweep.dir=.


def test_what_is_no_directory_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, words in (("file", "that is no directory"), ("link", "a link to what is not there")):
        with pytest.raises(ConfigError, match=words):
            directory.claim_chosen(tmp_path / name)


def test_a_project_with_files_of_such_names_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("image: x\n")
    (tmp_path / "job.json").write_text('{"image": "x"}')
    assert directory.claim_chosen(tmp_path / "runs" / "a").is_dir()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    assert directory.claim_chosen(tmp_path / "runs" / "b").is_dir()


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
    assert directory.claimed(tmp_path, "digits") == []
    new_run(tmp_path, stamp="20260101-000001-ffff")
    newest = new_run(tmp_path, stamp="20260101-000002-0000")
    new_run(tmp_path, name="other", stamp="20270101-000000-0000")
    cut_off = directory.claim(tmp_path, "digits")  # before its recipe was written
    assert directory.claimed(tmp_path, "digits")[1:] == [newest, cut_off]
    assert directory.is_run(newest)
    assert not directory.is_run(cut_off)


def test_two_runs_of_one_second_are_told_apart_by_their_recipes(tmp_path: Path) -> None:
    later, earlier = (new_run(tmp_path, stamp=f"20260101-000000-{i}000") for i in range(2))
    for age, path in enumerate((earlier, later)):
        os.utime(path / "config.yaml", (1e9 + age, 1e9 + age))
    assert directory.claimed(tmp_path, "digits") == [earlier, later]


def test_checkpoints_lie_where_the_recipe_says(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    assert directory.newest_checkpoint(run_dir) is None
    path = add_checkpoint(run_dir / "checkpoints", 3)
    assert directory.newest_checkpoint(run_dir) == path
    elsewhere = Recipe()
    elsewhere.checkpoint.project.set_directories("states")
    other = new_run(tmp_path, name="other", checkpoint=elsewhere.checkpoint)
    assert directory.checkpoint_folder(other) == tmp_path / "states" / "checkpoints"
