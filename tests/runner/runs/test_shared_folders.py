"""Runs with one folder for checkpoints: none takes, prunes or overwrites another's (R6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from accel.config.training import ProjectConfiguration
from accel.machine.errors import CheckpointError
from runner import cli
from runner.exit_codes import REFUSED
from runner.inference.load import described, find_checkpoint
from runner.launch import failures
from runner.recipe.schema import Checkpoint, Recipe
from runner.runs import directory
from runner.training.checkpointing import best_checkpoint
from tests.runner.loops import recipe_of, run
from tests.runner.runs.test_directory import new_run

NAMES = ("20260101-000001-aaaa", "20260101-000002-bbbb")


def shared(folder: Path, **fields: bool) -> Checkpoint:
    return Checkpoint(project=ProjectConfiguration(project_dir=str(folder / "all"), **fields))  # type: ignore[arg-type]


def add(folder: Path, number: int, step: int, run: str | None) -> Path:
    path = folder / f"checkpoint_{number}"
    staged = checkpoints.stage(path)
    (staged / "model.safetensors").write_bytes(b"weights")
    best = {"step": step, "metric": "loss", "value": 1.0}
    checkpoints.seal(staged, {}, {"step": step, "run": run, "best": best})
    checkpoints.publish(staged, path)
    return path


def two_runs(folder: Path) -> tuple[Path, Path, Path]:
    first, second = (new_run(folder, stamp=name, checkpoint=shared(folder)) for name in NAMES)
    return first, second, folder / "all" / "checkpoints"


def test_a_run_goes_on_from_checkpoints_of_its_own(tmp_path: Path) -> None:
    first, second, folder = two_runs(tmp_path)
    own = add(folder, 0, 6, first.name)
    assert directory.newest_checkpoint(second) is None
    other = add(folder, 1, 24, second.name)
    assert directory.newest_checkpoint(first) == own
    assert directory.newest_checkpoint(second) == other
    for which in (None, "best", "last", "checkpoint_0"):
        assert find_checkpoint(first, which) == own
    for which in (None, "best", "last", "checkpoint_1", str(other)):
        assert find_checkpoint(second, which) == other
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        find_checkpoint(first, "checkpoint_1")
    assert described(own, first).endswith("(step 6, the best)")
    assert best_checkpoint(folder, directory.owner(first)) == own


def test_a_run_that_was_moved_keeps_its_checkpoints(tmp_path: Path) -> None:
    first, _, folder = two_runs(tmp_path)
    own = add(folder, 0, 6, first.name)
    moved = first.rename(first.with_name("kept"))
    assert directory.newest_checkpoint(moved) == own
    inside = new_run(tmp_path, name="inside", stamp=NAMES[0])
    own = add(inside / "checkpoints", 3, 6, "what it was called")
    assert directory.newest_checkpoint(inside) == own


def test_a_new_run_wants_a_folder_of_its_own(tmp_path: Path) -> None:
    recipe = Recipe(checkpoint=shared(tmp_path))
    assert directory.problems(recipe) == []
    add(tmp_path / "all" / "checkpoints", 0, 6, NAMES[0])
    (problem,) = directory.problems(recipe)
    assert "holds checkpoints" in str(problem)
    assert NAMES[0] in str(problem)


def test_jobs_of_a_sweep_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["-m", "seed=0,1", f"checkpoint.project.project_dir={tmp_path / 'all'}"]
    assert cli.main(line) == 2
    assert "2 jobs would share this one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_started_at_one_time_neither_overwrites_the_other(tmp_path: Path) -> None:
    project = {"automatic_checkpoint_naming": False}
    recipe = recipe_of(trainer__max_steps=5, trainer__epochs=None)
    recipe.checkpoint = shared(tmp_path, **project)
    run(tmp_path / NAMES[0], recipe)
    folder = tmp_path / "all" / "checkpoints"
    before = (folder / "checkpoint_5" / checkpoints.MANIFEST).read_text()
    with pytest.raises(CheckpointError, match=f"of another run \\({NAMES[0]}\\)"):
        run(tmp_path / NAMES[1], recipe)
    assert (folder / "checkpoint_5" / checkpoints.MANIFEST).read_text() == before


def test_old_checkpoints_of_another_run_are_not_pruned(tmp_path: Path) -> None:
    folder = tmp_path / "all" / "checkpoints"
    for number in range(2):
        add(folder, number, number, NAMES[1])
    recipe = recipe_of(trainer__max_steps=4, trainer__epochs=None, checkpoint__every_steps=1)
    project = ProjectConfiguration(str(tmp_path / "all"), None, True, 2, 2)
    recipe.checkpoint.project = project
    run(tmp_path / NAMES[0], recipe)
    left = {path.name for path in checkpoints.checkpoints(folder)}
    assert {"checkpoint_0", "checkpoint_1"} < left


def test_checkpoints_elsewhere_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = new_run(tmp_path, checkpoint=shared(tmp_path))
    add(tmp_path / "all" / "checkpoints", 0, 6, "another")
    failures.print_interrupted(run_dir)
    assert "before the first checkpoint" in capsys.readouterr().err
    add(tmp_path / "all" / "checkpoints", 1, 6, run_dir.name)
    failures.print_interrupted(run_dir)
    assert "resume=" in capsys.readouterr().err
    directory.remove_unstarted(run_dir, REFUSED)
    assert run_dir.is_dir()
