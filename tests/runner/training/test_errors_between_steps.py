"""R9: an error between two steps saves the last whole step; one inside a step saves nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.checkpoint.directory import checkpoints, read_manifest
from runner.training.metrics import NonFiniteError
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.loops import Fit, build, newest, recipe_of, records, run, weights


class FailsAt(Callback):
    """Raises in an event at a step; of one rank alone where that is given."""

    def __init__(self, event: str, step: int, rank: int | None = None) -> None:
        self.event, self.step, self.rank = event, step, rank

    def _meet(self, event: str, loop: Any) -> None:
        here = self.rank in (None, loop.accelerator.process_index)
        if (event, loop.state.step) == (self.event, self.step) and here:
            raise ZeroDivisionError("of the user")

    def on_step(self, loop: Any) -> None:
        self._meet("step", loop)

    def on_log(self, loop: Any, values: Mapping[str, float]) -> None:
        self._meet("log", loop)

    def on_evaluate(self, loop: Any, split: str, metrics: Mapping[str, float]) -> None:
        self._meet("evaluate", loop)


class FailsToMeasure(Fit):
    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        raise ZeroDivisionError("of the user")


class FailsToTrain(Fit):
    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().losses(model, batch)


def saved_steps(run_dir: Path) -> list[int]:
    found = map(read_manifest, checkpoints(run_dir / "checkpoints"))
    return [manifest.metadata["step"] for manifest in found]


@pytest.mark.parametrize("event", ["step", "log", "evaluate"])
def test_a_callback_loses_no_step(tmp_path: Path, event: str) -> None:
    recipe = recipe_of(trainer__eval_every=3)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, recipe, callbacks={"fails": FailsAt(event, 3)})
    assert saved_steps(tmp_path) == [3]


def test_an_evaluation_that_fails_loses_no_step(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, recipe_of(), objective=FailsToMeasure())
    assert saved_steps(tmp_path) == [5]


def test_an_error_inside_a_step_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, recipe_of(), objective=FailsToTrain(ZeroDivisionError()))
    assert saved_steps(tmp_path) == []


def test_a_loss_that_is_no_number_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        run(tmp_path, recipe_of(), objective=loops.Exploding())
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize(
    "options", [{"callbacks": {"f": FailsAt("evaluate", 10)}}, {"objective": FailsToMeasure()}]
)
def test_the_evaluation_is_made_up_for_by_the_resume(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """After an error in or behind an evaluation: bit-equal, and each record once."""
    run(tmp_path / "whole", recipe_of(), make_scheduler=loops.plateau)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", recipe_of(), make_scheduler=loops.plateau, **options)
    run(
        tmp_path / "cut",
        recipe_of(),
        make_scheduler=loops.plateau,
        resume_from=newest(tmp_path / "cut"),
    )
    for split in ("train", "validation", "test"):
        kept = [
            [(one["step"], one["loss"]) for one in records(tmp_path / name, split)]
            for name in ("whole", "cut")
        ]
        assert kept[0] == kept[1]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one)


def fail_on(run_dir: str, rank: int | None) -> list[int]:
    loop = build(Path(run_dir), recipe_of(), callbacks={"fails": FailsAt("log", 3, rank)})
    loop.state.step, loop._begun = 3, True
    if rank in (None, loop.accelerator.process_index):  # else it is in another collective
        with pytest.raises(ZeroDivisionError), loop._saved_on_error():
            loop.notify("on_log", {"loss": math.nan})
    return saved_steps(Path(run_dir))


@pytest.mark.parametrize(("rank", "saved"), [(None, [3]), (1, [])])
def test_ranks_save_together_or_not_at_all(
    tmp_path: Path, rank: int | None, saved: list[int]
) -> None:
    assert run_distributed(fail_on, 2, str(tmp_path), rank)[1] == saved
