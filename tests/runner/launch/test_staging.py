"""What the next session of a run begins with (R7, R9)."""

from __future__ import annotations

from pathlib import Path

from runner.launch import staging
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from tests.runner.runs.test_directory import add_checkpoint

RECIPE = Recipe()


def test_a_restart_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    failed = Job(tmp_path, overrides=("seed=0",)).save(RECIPE)
    state = add_checkpoint(tmp_path / "checkpoints", 3)
    again = staging.again(failed, RECIPE)
    assert (again.place.name, again.resume_from, again.overrides) == (
        "0002",
        str(state),
        ("seed=0",),
    )
    assert staging.origin(again) == "checkpoints/checkpoint_3"
    assert staging.restarts_used(tmp_path) == 1


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    failed = Job(tmp_path, resume_from="gone").save(RECIPE)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    again = staging.again(failed, RECIPE)
    assert again.resume_from is None
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (failed.place / "metrics.jsonl").exists()
    assert staging.origin(again).startswith("the beginning")
