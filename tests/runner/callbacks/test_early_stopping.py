"""R2, C1: early stopping ends a run without progress, also after a resume."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from accel.machine.errors import ConfigError
from runner.callbacks.early_stopping import EarlyStopping
from runner.data.datasets import Data
from runner.recipe.schema import Recipe
from runner.training.console import Display
from tests.runner.loops import NUM_TRAIN, Fit, Points, Scripted, newest, recipe_of, run


def data() -> Data:
    return Data(Points(NUM_TRAIN), Points(8))


@pytest.mark.parametrize(
    ("arguments", "values", "step"),
    [
        ({"patience": 2}, (3.0, 2.0, 2.0, 2.5, 1.0), 20),
        ({"patience": 1}, (3.0, 2.0, 2.0), 15),
        ({"patience": 2, "min_delta": 0.5}, (3.0, 2.0, 1.7, 1.6, 1.0), 20),
        ({"patience": 2, "mode": "max"}, (1.0, 2.0, 1.0, 1.5), 20),
        ({"patience": 2}, (float("nan"), float("nan")), 10),
        ({"patience": 1, "start": 11}, (1.0, 2.0, 2.0, 2.0), 20),
        ({"threshold": 2.0}, (3.0, 2.0), 10),
        ({"divergence": 3.0}, (3.0, 2.0, 3.5), 15),
        ({"divergence": 3.0, "start": 10}, (9.0, float("nan")), 10),
    ],
)
def test_a_run_without_progress_is_ended(
    tmp_path: Path, arguments: dict[str, Any], values: tuple[float, ...], step: int
) -> None:
    summary = run(
        tmp_path,
        recipe_of(trainer__epochs=9),
        data=data(),
        objective=Scripted(*values),
        callbacks={"early_stopping": EarlyStopping(**arguments)},
    )
    assert (summary["stopped"], summary["step"]) == ("callback", step)
    assert "loss" in summary["reason"]


def test_patience_is_counted_over_a_resume(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=9)
    # The state of step 10 was saved before its evaluation, which the resume makes.
    for values, step, stop in (((1.0, 2.0), 10, 10), ((2.0, 2.0), 15, None)):
        recipe.trainer.stop_after = stop
        summary = run(
            tmp_path,
            recipe,
            data=data(),
            objective=Scripted(*values),
            callbacks={"early_stopping": EarlyStopping(patience=2)},
            resume_from=newest(tmp_path) if step == 15 else None,
        )
        assert summary["step"] == step
    assert summary["stopped"] == "callback"


@pytest.mark.parametrize(
    ("arguments", "changes", "waits"),
    [
        ({}, {}, True),
        ({}, {"checkpoint__monitor": "accuracy", "checkpoint__mode": "max"}, False),
        ({"monitor": "accuracy", "mode": "max"}, {}, False),
        ({"mode": "max"}, {}, False),
        ({}, {"objective": {"name": "scripted", "smoothing": 0.1}}, False),
        ({}, {"data": {"name": "points", "other": True}}, False),
    ],
    ids=["same", "run", "own", "mode", "objective", "data"],
)
def test_another_measure_is_not_compared_with_the_best_before(
    tmp_path: Path, arguments: dict[str, Any], changes: dict[str, Any], waits: bool
) -> None:
    """An accuracy is no improvement of a loss, and none of it does not end the run."""
    nodes = {"objective": {"name": "scripted"}, "data": {"name": "points"}}

    class Accurate(Scripted):
        def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
            found = super().summarize(values)
            return {**found, "accuracy": 0.5 - found["loss"]}

    def last(callback: EarlyStopping, objective: Fit, recipe: Recipe, **options: Any) -> str:
        summary = run(
            tmp_path,
            recipe,
            data=data(),
            objective=objective,
            callbacks={"early_stopping": callback},
            **options,
        )
        return str(summary["stopped"])

    first, then = EarlyStopping(patience=3), EarlyStopping(patience=3, **arguments)
    recipe = recipe_of(trainer__epochs=9, trainer__stop_after=15, **nodes)
    assert last(first, Accurate(0.01, 0.2, 0.3), recipe) == "stop_after"
    assert (first.best, first.num_waited) == (0.01, 2)
    objective = Accurate(*((0.4, 0.4) if waits else (0.4, 0.3, 0.2)))
    recipe = recipe_of(trainer__epochs=9, trainer__stop_after=25, **{**nodes, **changes})
    told = io.StringIO()
    reached = last(
        then,
        objective,
        recipe,
        resume_from=newest(tmp_path),
        display=Display(console=Console(file=told, width=300)),
    )
    assert reached == ("callback" if waits else "stop_after")
    assert ("Early stopping monitored another metric" in told.getvalue()) is not waits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience=0: it is at least 1"),
        ({"min_delta": -1.0}, "min_delta=-1.0: it is at least 0"),
        ({"mode": "mx"}, "Did you mean 'max'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**arguments)


def test_what_it_follows_must_be_there(tmp_path: Path) -> None:
    callbacks = {"early_stopping": EarlyStopping(monitor="coun")}
    with pytest.raises(ConfigError, match="Did you mean 'count'"):
        run(tmp_path / "a", recipe_of(trainer__sanity_steps=1), callbacks=callbacks)
    callbacks = {"early_stopping": EarlyStopping()}
    with pytest.raises(ConfigError, match="without validation data"):
        run(tmp_path / "b", recipe_of(), data=Data(Points(NUM_TRAIN)), callbacks=callbacks)
