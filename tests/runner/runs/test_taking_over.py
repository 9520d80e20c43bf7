"""R4, R7: a loop changes its run directory from its first step on, and survives a damaged best."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.checkpoint.directory import read_manifest
from runner.training.checkpointing import best_checkpoint
from runner.training.loop import Loop
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.resume_matrix.cells import tree
from tests.runner.loops import Fit, build, newest, recipe_of, records, run
from tests.runner.training.test_loop import Worsening


class Breaking(Fit):
    """Fails in the first step, after it has been measured."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            raise RuntimeError("shapes do not match")
        return super().losses(model, batch)


def stopped(folder: Path, **more: Any) -> Path:
    run(folder, recipe_of(trainer__epochs=3, trainer__stop_after=7), **more)
    return folder


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")


# -- the first step ------------------------------------------------------------------------


def test_nothing_changes_before_the_first_step(tmp_path: Path) -> None:
    before = tree(stopped(tmp_path))
    asked: list[str] = []
    loop = build(
        tmp_path,
        recipe_of(trainer__epochs=3),
        objective=Breaking(),
        resume_from=newest(tmp_path),
        on_begin=lambda: asked.append("begun"),
    )
    with pytest.raises(RuntimeError, match="shapes"):
        loop.run()
    assert (asked, tree(tmp_path)) == ([], before)


@pytest.mark.parametrize("step", [7, 15])
def test_the_directory_is_taken_over_once(tmp_path: Path, step: int) -> None:
    run(tmp_path, recipe_of(trainer__epochs=3, trainer__stop_after=step))
    (tmp_path / "summary.json").unlink()  # cut off before its end
    asked: list[int] = []
    options: dict[str, Any] = {"on_begin": lambda: asked.append(len(records(tmp_path)))}
    summary = run(tmp_path, recipe_of(trainer__epochs=3), resume_from=newest(tmp_path), **options)
    assert asked == [step]
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 16))
    assert len(records(tmp_path, "test")) == 1
    assert set(summary["metrics"]) == {"validation", "test"}
    assert summary["samples_per_second"] > 0
    assert [r["step"] for r in records(tmp_path, "validation")] == [5, 10, 15]


# -- a damaged best state ------------------------------------------------------------------


class Damage(Callback):
    """Damages the best state in the middle of the run."""

    def on_step(self, loop: Loop) -> None:
        if loop.state.step == 7 and loop.accelerator.is_main_process:
            damage(loop.saver.best)


def damaged_while_it_trains(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"objective": Worsening(), "callbacks": {"damage": Damage()}}
    return run(folder, recipe_of(trainer__epochs=3), **options)


def test_a_best_state_that_is_damaged_while_it_trains_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        summary = damaged_while_it_trains(tmp_path / "one")
    assert summary["complete"]
    assert summary["best"]["checkpoint"] is None
    assert "test" in summary["metrics"]
    assert "The best checkpoint is skipped." in caplog.text
    for summary in run_distributed(damaged_while_it_trains, 2, tmp_path / "two"):
        assert summary["complete"]


def test_a_best_state_that_is_damaged_before_a_resume_is_looked_for_anew(tmp_path: Path) -> None:
    stopped(tmp_path, objective=Worsening())
    best = best_checkpoint(tmp_path / "checkpoints")
    assert best is not None
    damage(best)
    summary = run(
        tmp_path, recipe_of(trainer__epochs=3), objective=Worsening(), resume_from=newest(tmp_path)
    )
    assert summary["complete"]
    assert summary["best"]["step"] == 10
    assert read_manifest(newest(tmp_path)).metadata["best"]["step"] == 10
