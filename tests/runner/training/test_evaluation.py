"""Evaluations within training."""

from __future__ import annotations

from pathlib import Path

from runner.data.datasets import Data
from tests.runner.loops import (
    NUM_TRAIN,
    Points,
    build,
    losses,
    recipe_of,
    run,
)


def test_evaluating_changes_no_training(tmp_path: Path) -> None:
    run(tmp_path / "often", recipe_of(trainer__eval_every=1), dropout=0.3)
    run(tmp_path / "never", recipe_of(), dropout=0.3, data=Data(Points(NUM_TRAIN)))
    assert losses(tmp_path / "often") == losses(tmp_path / "never")


def test_modes_of_modules_are_put_back(tmp_path: Path) -> None:
    loop = build(tmp_path, recipe_of(trainer__epochs=1))
    frozen = loop.step.models["model"][1]
    frozen.eval()
    loop.run()
    assert not frozen.training
    assert loop.step.models["model"].training
