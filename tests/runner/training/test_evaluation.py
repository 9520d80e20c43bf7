"""R1, R3: evaluations within training do not change it, and can be interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.checkpoint.directory import read_manifest
from runner.data.datasets import Data
from runner.training.stopping import StopFlag
from tests.runner.loops import (
    NUM_TRAIN,
    Fit,
    Points,
    build,
    losses,
    newest,
    plateau,
    recipe_of,
    records,
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


class KillInEvaluation(Fit):
    def __init__(self, flag: StopFlag) -> None:
        self.flag = flag

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        self.flag.request("SIGUSR1")
        return super().evaluate(model, batch)


def test_a_signal_in_an_evaluation_leaves_it(tmp_path: Path) -> None:
    flag = StopFlag()
    summary = run(tmp_path, recipe_of(), objective=KillInEvaluation(flag), stop_flag=flag)
    assert (summary["stopped"], summary["step"]) == ("signal", 5)
    assert records(tmp_path, "validation") == []
    assert read_manifest(newest(tmp_path)).metadata["step"] == 5


def test_evaluations_come_every_some_steps(tmp_path: Path) -> None:
    run(tmp_path, recipe_of(trainer__max_steps=9, trainer__eval_every=4))
    assert [record["step"] for record in records(tmp_path, "validation")] == [4, 8, 9]


def test_a_plateau_schedule_follows_the_monitored_metric(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=3, checkpoint__monitor="count", checkpoint__mode="min")
    run(tmp_path, recipe, make_scheduler=plateau)  # the count never changes
    rates = {record["epoch"]: record["lr"] for record in records(tmp_path)}
    assert rates == {1: 0.02, 2: 0.02, 3: 0.01}
