"""R7: the files that describe a run change all together or not at all, at its first step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import serialization
from runner.recipe.schema import Recipe, Trainer
from runner.run_dir import atomic_update
from runner.run_dir.job import Job

OLD, NEW = (Recipe(trainer=Trainer(epochs=epochs)) for epochs in (1, 2))


def run(folder: Path) -> Path:
    Job(folder, ("trainer.epochs=1",), cwd="/here").save(OLD)
    return folder


def epochs(folder: Path) -> int | None:
    return Job.load(folder)[1].trainer.epochs


class Cut(Exception):
    """The process is killed here."""


def test_nothing_changes_before_the_commit(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in run(tmp_path).iterdir()}
    staged = Job(tmp_path, ("trainer.epochs=2",)).stage(NEW)
    found, recipe = Job.load(staged.place)
    assert (found, recipe) == (staged, NEW)
    assert found.run_dir == tmp_path
    assert epochs(tmp_path) == 1
    atomic_update.discard(staged.place)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_commit_keeps_the_recipe_before_under_a_name(tmp_path: Path) -> None:
    run(tmp_path)
    atomic_update.commit(Job(tmp_path).stage(NEW).place)
    atomic_update.commit(Job(tmp_path).stage(NEW).place)  # the same again: nothing to keep
    Job(tmp_path).save(OLD)
    assert [path.name for path in atomic_update.kept_recipes(tmp_path)] == [
        "config.0001.yaml",
        "config.0002.yaml",
    ]
    assert "epochs: 1" in (tmp_path / "config.0001.yaml").read_text()
    assert "epochs: 2" in (tmp_path / "config.0002.yaml").read_text()
    assert epochs(tmp_path) == 1


@pytest.mark.parametrize("function", ["link", "rename", "replace", "fsync", "rmdir"])
def test_a_commit_that_is_cut_off_leaves_the_old_or_the_new(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        folder = tmp_path / f"{function}{number}"
        folder.mkdir()
        run(folder)
        staged = Job(folder, ("trainer.epochs=2",)).stage(NEW)
        calls = iter(range(number))
        real = getattr(os, function)

        def cut(*args: object, real: object = real, calls: object = calls, **named: object) -> None:
            if next(calls, None) is None:  # type: ignore[call-overload]
                raise Cut
            real(*args, **named)  # type: ignore[operator]

        monkeypatch.setattr(os, function, cut)
        try:
            atomic_update.commit(staged.place)
            ended = True
        except Cut:
            ended = False
        monkeypatch.undo()
        found, recipe = Job.load(folder)  # as `eval` reads it, without the lock
        assert (recipe.trainer.epochs, found.overrides[0]) in (
            (1, "trainer.epochs=1"),
            (2, "trainer.epochs=2"),
        )
        atomic_update.recover(folder)
        assert Job.load(folder) == (found, recipe)
        assert not [path for path in folder.iterdir() if path.name[0] == "."]
        assert ended == (recipe.trainer.epochs == 2) or recipe.trainer.epochs == 2
        if ended:
            return
    raise AssertionError("the commit never came to its end")


# -- what workers read ---------------------------------------------------------------------


def test_a_job_is_read_as_it_was_saved(tmp_path: Path) -> None:
    model = {"name": "cnn", "width": 4, "dropout": 0.0, "num_classes": 10}
    plain = {"name": "x", "trainer": {"max_steps": 3}, "model": model}
    frozen = serialization.from_plain(plain)
    job = Job(tmp_path, ("trainer.max_steps=3",), resume_from="somewhere", cwd="/here")
    job.save(frozen)
    assert Job.load(tmp_path) == (job, frozen)
    assert (tmp_path / "overrides.yaml").read_text() == "- trainer.max_steps=3\n"


def test_a_job_does_not_decide_what_is_trusted(tmp_path: Path) -> None:
    Job(tmp_path, imports=("evil",)).save(Recipe())
    with pytest.raises(ConfigError, match="'evil', which is not trusted here"):
        Job.load(tmp_path)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{"])
def test_what_is_no_job_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "job.json").write_text(content)
    with pytest.raises(ConfigError, match="it is no run directory"):
        Job.load(tmp_path)
