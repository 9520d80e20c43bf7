"""The file of a job: what its workers read."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import serialization
from runner.recipe.schema import Recipe, Trainer
from runner.run_dir.job import Job


def test_a_job_is_read_as_it_was_saved(tmp_path: Path) -> None:
    frozen = serialization.from_plain(
        {"name": "x", "trainer": {"max_steps": 3}, "model": {"name": "cnn"}}
    )
    job = Job(tmp_path, ("trainer.max_steps=3",), resume_from="somewhere", cwd="/here")
    job.save(frozen)
    assert Job.load(tmp_path) == (job, frozen)
    assert (tmp_path / "overrides.yaml").read_text() == "- trainer.max_steps=3\n"


def test_a_resumed_job_keeps_the_recipe_before(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        Job(tmp_path).save(Recipe(trainer=Trainer(epochs=epochs)))
    assert Job.load(tmp_path)[1].trainer.epochs == 3
    assert "epochs: 1" in (tmp_path / "config.0001.yaml").read_text()
    assert "epochs: 2" in (tmp_path / "config.0002.yaml").read_text()


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


def test_a_frozen_recipe_is_read_again(tmp_path: Path) -> None:
    Job(tmp_path, cwd=str(tmp_path)).save(Recipe(trainer=Trainer(max_steps=5)))
    assert Job.load(tmp_path)[1] == Recipe(trainer=Trainer(max_steps=5))
