"""What the next attempt at a run begins with (R7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runner.launch import staging
from runner.recipe.schema import Recipe
from runner.run_dir.job import Job

RECIPE = Recipe()


def test_an_attempt_that_changed_nothing_is_made_again(tmp_path: Path) -> None:
    Job(tmp_path).save(RECIPE)
    staged = staging.staged(Job(tmp_path, resume_from="checkpoint"), RECIPE)
    assert staging.again(staged, RECIPE) is staged
    assert staging.origin(staged) == "checkpoint"


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    job = Job(tmp_path, overrides=("seed=0",))
    job.save(RECIPE)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    again = staging.again(replace(job, resume_from="gone"), RECIPE)
    assert again == job
    assert Job.read(tmp_path)[0] == job
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "logs" / "attempt_1" / "metrics.jsonl").exists()
    assert staging.origin(again).startswith("the beginning")
