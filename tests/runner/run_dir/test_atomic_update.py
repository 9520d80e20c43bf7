"""The files that describe a run change all together or not at all, and either can be restored."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe.schema import Recipe, Trainer
from runner.run_dir import atomic_update, job, numerics
from runner.run_dir.job import Job
from runner.run_dir.numerics import Numerics

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
        job.mend(folder)
        assert Job.load(folder) == (found, recipe)
        assert not [path for path in folder.iterdir() if path.name[0] == "."]
        assert ended == (recipe.trainer.epochs == 2) or recipe.trainer.epochs == 2
        if ended:
            return
    raise AssertionError("the commit never came to its end")


# -- damage --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\0" * 100, "half", "lines"])
def test_a_recipe_that_is_lost_is_taken_from_the_job(
    content: bytes | str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run(tmp_path) / "config.yaml"
    whole = config.read_bytes()
    if content is None:
        config.unlink()
    elif content == "half":
        config.write_bytes(whole[: len(whole) // 2])
    elif content == "lines":  # valid YAML: the rest would have its defaults
        config.write_bytes(whole[: whole.index(b"trainer:")])
    else:
        config.write_bytes(content)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert epochs(tmp_path) == 1
        assert epochs(tmp_path) == 1  # a command reads it several times
        job.mend(tmp_path)
    assert caplog.text.count("config.yaml is missing, empty or truncated") == 1
    assert config.read_bytes() == whole


def test_a_recipe_that_a_person_has_changed_holds(tmp_path: Path) -> None:
    config = run(tmp_path) / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 1", "epochs: 7"))
    assert epochs(tmp_path) == 7
    job.mend(tmp_path)
    assert epochs(tmp_path) == 7
    config.write_text("trainer: [")
    with pytest.raises(ConfigError, match="Correct the file"):
        Job.load(tmp_path)


WRONG_JOBS = [
    None,
    "",
    "{",
    "[]",
    "{}",
    '{"run_dir": "x", "overrides": "abc", "imports": [], "cwd": ".", "config_name": "config"}',
    '{"run_dir": "x", "overrides": [], "imports": [], "cwd": 3, "config_name": "config"}',
]


@pytest.mark.parametrize("content", WRONG_JOBS)
def test_a_job_that_is_lost_is_put_together(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = run(tmp_path) / "job.json"
    (tmp_path / "environment.json").write_text('{"cwd": "/here"}')
    expected = Job.load(tmp_path)
    file.unlink() if content is None else file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert Job.load(tmp_path) == expected
    assert "job.json is" in caplog.text
    job.mend(tmp_path)
    caplog.clear()
    assert Job.load(tmp_path) == expected
    assert caplog.text == ""


def test_where_both_are_lost_the_kept_recipe_is_named(tmp_path: Path) -> None:
    Job(run(tmp_path)).save(NEW)
    for name in ("config.yaml", "job.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"An earlier recipe is config\.0001\.yaml"):
        Job.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"num_threads": "2"}', '{"num_threads": 0}', '{"cores": 2}'],
)
def test_damaged_threads_are_chosen_anew_with_a_word(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threads.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert numerics.read(tmp_path) == Numerics()
    assert "threads.json is damaged" in caplog.text
    numerics.record_threads(tmp_path, replace(OLD, deterministic=True), 1)
    assert json.loads((tmp_path / "threads.json").read_text())["num_threads"] >= 1
