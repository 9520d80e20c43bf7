"""C1, R10: mistakes of an evaluation and of monitors are refused before the first step.

The short evaluation that finds them leaves no trace in the run (R1, R2).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.checkpoint.directory import read_manifest
from accel.machine.errors import ConfigError
from runner.callbacks.early_stopping import EarlyStopping
from runner.data.datasets import Data
from runner.training.loop import LateError
from tests.runner import loops
from tests.runner.loops import NUM_TRAIN, Fit, Points, Spy, recipe_of, run, weights


class Broken(Fit):
    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        raise ZeroDivisionError("of the user")


class Counting(nn.Module):
    """Counts its forward passes, also those of evaluations, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x + 1e-3 * self.calls)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_bit_equal_with_and_without_it(tmp_path: Path, workers: int) -> None:
    seen = []
    for batches in (0, 2):
        spy = Spy()
        torch.manual_seed(0)  # of the model's weights
        run(
            tmp_path / str(batches),
            recipe_of(
                trainer__sanity_steps=batches, trainer__epochs=2, dataloader__num_workers=workers
            ),
            data=Data(Points(NUM_TRAIN, noisy=True), Points(13, noisy=True), Points(9)),
            model=Counting(),
            callbacks={"spy": spy},
        )
        seen.append((weights(tmp_path / str(batches)), spy.events))
        assert len(loops.records(tmp_path / str(batches), "validation")) == 2
    (without, events), (checked, same) = seen
    assert events == same
    assert without.keys() == checked.keys()
    assert all(torch.equal(without[name], checked[name]) for name in without)


@pytest.mark.parametrize(
    ("changes", "callbacks", "message"),
    [
        ({"checkpoint__monitor": "val_loss"}, {}, "checkpoint.monitor='val_loss': the evaluation"),
        ({}, {"early_stopping": EarlyStopping(monitor="val_loss")}, "early_stopping.monitor="),
        ({"checkpoint__monitor": "count"}, {}, "monitor=count without a mode.*checkpoint.mode=max"),
    ],
)
def test_a_monitor_that_nothing_measures_is_refused_before_a_step(
    tmp_path: Path, changes: dict[str, Any], callbacks: dict[str, Any], message: str
) -> None:
    recipe = recipe_of(trainer__sanity_steps=2, **changes)
    loop = loops.build(tmp_path, recipe, callbacks=callbacks)
    with pytest.raises(ConfigError, match=message):
        loop.run()
    assert loop.state.step == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_monitor_without_validation_data_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(checkpoint__monitor="loss")
    with pytest.raises(ConfigError, match="monitor=loss without validation data"):
        run(tmp_path, recipe, data=Data(Points(NUM_TRAIN), test=Points(9)))


@pytest.mark.parametrize("data", [None, Data(Points(NUM_TRAIN), test=Points(9))])
def test_an_error_of_the_evaluation_comes_before_the_first_step(
    tmp_path: Path, data: Data | None
) -> None:
    loop = loops.build(tmp_path, recipe_of(trainer__sanity_steps=2), objective=Broken(), data=data)
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        loop.run()
    assert loop.state.step == 0
    assert "trainer.sanity_steps=2" in caught.value.__notes__[0]


def test_a_resume_has_none(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__sanity_steps=2, trainer__epochs=2, trainer__stop_after=3)
    run(tmp_path, recipe)
    recipe.trainer.stop_after = 4
    loop = loops.build(tmp_path, recipe, objective=Broken(), resume_from=loops.newest(tmp_path))
    assert loop.run()["step"] == 4


def test_a_mistake_that_is_found_late_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(LateError, match="val_loss"):
        run(tmp_path, recipe_of(checkpoint__monitor="val_loss"))
    assert read_manifest(loops.newest(tmp_path)).metadata["step"] == 5


USER = """
from runner import Objective, register
from runner.builtin.digits import Classification

@register.objective("broken")
class Broken(Classification):
    def summarize(self, values):
        raise ZeroDivisionError("of the user")
"""


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["checkpoint.monitor=val_loss"], 2, "checkpoint.monitor='val_loss'"),
        (["objective.name=broken"], 1, "ZeroDivisionError: of the user"),
        (["checkpoint.monitor=val_loss", "trainer.sanity_steps=0"], 1, "checkpoint.monitor"),
    ],
)
def test_a_refused_command_leaves_nothing(
    tmp_path: Path, overrides: list[str], code: int, said: str
) -> None:
    (tmp_path / "own.py").write_text(USER)
    command = [sys.executable, "-m", "runner", "--import", "own"]
    command += ["trainer.epochs=1", "trainer.limit_train_batches=2", "run_dir=here", *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert (tmp_path / "here").exists() is (code == 1)  # a failed command is a try of the run
