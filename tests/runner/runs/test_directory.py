"""R10: a run directory is claimed once, found again, and removed if nothing was started in it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.exit_codes import REFUSED
from runner.launch import launcher, worker
from runner.recipe import trust
from runner.recipe.processes import Adopted
from runner.recipe.schema import Recipe
from runner.runs import directory, sessions
from runner.runs.job import Job


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


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name of one folder"):
        directory.claim(tmp_path, name)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        directory.claim(tmp_path / "file", "digits")
    with pytest.raises(ConfigError, match="run_dir"):
        directory.claim_chosen(tmp_path / "file")


@pytest.mark.parametrize(("held", "words"), [("sessions", "holds another run"), ("a.py", "a.py")])
def test_a_chosen_directory_is_empty(held: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "slurm-7.out").touch()  # of the command itself
    (tmp_path / ".lock").touch()
    assert directory.claim_chosen(tmp_path) == tmp_path
    if held == "sessions":
        session = Job(tmp_path).save(Recipe()).place
        assert directory.claim_chosen(tmp_path) == tmp_path  # it has made no step
        sessions.begin(session)
    else:
        (tmp_path / held).write_text("{}")
    with pytest.raises(directory.UsedError, match=words):
        directory.claim_chosen(tmp_path)


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


def test_checkpoints_lie_where_the_recipe_says(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    assert directory.newest_checkpoint(run_dir) is None
    path = add_checkpoint(run_dir / "checkpoints", 3)
    assert directory.newest_checkpoint(run_dir) == path
    elsewhere = Recipe()
    elsewhere.checkpoint.project.set_directories("states")
    runs = [new_run(tmp_path, "other", stamp, checkpoint=elsewhere.checkpoint) for stamp in "ab"]
    folders = [directory.checkpoint_folder(run) for run in runs]
    assert {folder.parents[1] for folder in folders} == {tmp_path / "states"}
    first, second = (add_checkpoint(folder, 3) for folder in folders)
    assert first != second
    moved = runs[0].rename(tmp_path / "moved")
    recipe = replace(Recipe(), checkpoint=elsewhere.checkpoint)
    sessions.begin(Job.read(moved)[0].save(recipe).place)
    assert directory.newest_checkpoint(moved) == first
    assert directory.newest_checkpoint(runs[1]) == second


# -- runs that came to nothing -------------------------------------------------------------


@pytest.mark.parametrize("is_new", [True, False])
def test_under_a_launcher_only_a_new_run_is_removed(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    if not is_new:
        sessions.begin(sessions.of_run(run_dir)[0])
    folder = Job(run_dir).save(Recipe()).place
    monkeypatch.setattr(launcher, "run_here", lambda *given: REFUSED)
    monkeypatch.setattr(worker, "end_process", lambda code: None)
    place = Adopted(**{name: 0 for name in Adopted.__dataclass_fields__})
    assert launcher.run_adopted(folder, place) == REFUSED
    assert run_dir.exists() is not is_new


def test_what_is_measured_anew_stays_with_its_session_and_logs_stay(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("said")
    for number in (1, 2):
        folder = Job(tmp_path).save(Recipe()).place
        (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text(f"{number}")
        directory.set_aside(tmp_path)
        assert (folder / "metrics.jsonl").read_text() == f"{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "sessions"]
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "said"


def test_the_command_that_resumes_a_run_names_the_packages_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(trust.VARIABLE, "mine")
    assert directory.resume_command("a b") == "runner resume='a b' --import mine"
