"""R7: a run is a list of sessions, each written once; one counts from its first step on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import serialization
from runner.recipe.schema import Recipe, Trainer
from runner.runs import sessions
from runner.runs.job import Job

OLD, NEW = (Recipe(trainer=Trainer(epochs=epochs)) for epochs in (1, 2))


def epochs(folder: Path) -> int | None:
    return Job.load(folder)[1].trainer.epochs


def session(run_dir: Path, recipe: Recipe, begun: bool = True) -> Path:
    place = (
        Job(run_dir, (f"trainer.epochs={recipe.trainer.epochs}",), cwd="/here").save(recipe).place
    )
    if begun:
        sessions.begin(place)
    return place


class Cut(Exception):
    """The process is killed here."""


def test_a_session_counts_from_its_first_step_on(tmp_path: Path) -> None:
    first = session(tmp_path, OLD, begun=False)
    assert epochs(tmp_path) == 1  # of a run that waits to be started
    sessions.begin(first)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    second = session(tmp_path, NEW, begun=False)
    assert (second.name, epochs(second), Job.read(second)[0].run_dir) == ("0002", 2, tmp_path)
    assert epochs(tmp_path) == 1
    assert {path: path.read_bytes() for path in before} == before
    sessions.begin(second)
    assert epochs(tmp_path) == 2
    assert "epochs: 2" in (tmp_path / "config.yaml").read_text()  # the copy for people
    assert sessions.run_dir_of(second) == tmp_path


def test_a_session_ends_once_and_tells_how(tmp_path: Path) -> None:
    session(tmp_path, OLD)
    second = session(tmp_path, OLD)
    assert sessions.summary(tmp_path) == {}
    sessions.end(second, 0, summary={"step": 3})
    sessions.end(second, 1)  # of the parent, which has waited
    assert sessions.summary(tmp_path) == {"step": 3}
    session(tmp_path, OLD)
    assert sessions.summary(tmp_path) == {}  # the run goes on


@pytest.mark.parametrize("function", ["mkdir", "replace", "fsync"])
def test_a_session_that_is_cut_off_leaves_the_old_or_the_new(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, function)
    for number in range(40):
        folder = tmp_path / f"{function}{number}"
        folder.mkdir()
        session(folder, OLD)
        calls = iter(range(number))

        def cut(*args: object, calls: object = calls, **named: object) -> None:
            if next(calls, None) is None:  # type: ignore[call-overload]
                raise Cut
            real(*args, **named)

        monkeypatch.setattr(os, function, cut)
        try:
            session(folder, NEW)
            ended = True
        except Cut:
            ended = False
        monkeypatch.undo()
        found, recipe = Job.load(folder)  # as `eval` reads it, without the lock
        assert (recipe.trainer.epochs, found.overrides[0]) in (
            (1, "trainer.epochs=1"),
            (2, "trainer.epochs=2"),
        )
        if ended:
            assert recipe.trainer.epochs == 2
            return
    raise AssertionError("it never came to its end")


# -- what workers read ---------------------------------------------------------------------


def test_a_job_is_read_as_it_was_saved(tmp_path: Path) -> None:
    model = {"name": "cnn", "width": 4, "dropout": 0.0, "num_classes": 10}
    plain = {"name": "x", "trainer": {"max_steps": 3}, "model": model}
    frozen = serialization.from_plain(plain)
    job = Job(tmp_path, ("trainer.max_steps=3",), resume_from="somewhere", cwd="/here")
    saved = job.save(frozen)
    assert Job.load(tmp_path) == Job.load(saved.place) == (job, frozen)


def test_a_job_does_not_decide_what_is_trusted(tmp_path: Path) -> None:
    Job(tmp_path, imports=("evil",)).save(Recipe())
    with pytest.raises(ConfigError, match="'evil', which is not trusted here"):
        Job.load(tmp_path)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{"])
def test_what_is_no_job_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (sessions.create(tmp_path) / "job.json").write_text(content)
    with pytest.raises(ConfigError, match="it is no run directory"):
        Job.load(tmp_path)
