"""E3, R1: a step's gradient does not depend on how its samples are cut into micro-batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner.data.batches import MicroBatch, Window
from runner.training.console import Display
from runner.training.loop import Loop
from runner.training.step import SupervisedStep
from tests.runner import loops
from tests.runner.loops import recipe_of


class OwnStep(SupervisedStep):
    """A step as a user writes it: `loss` of a micro-batch goes to `Accelerator.backward`."""

    def loss(self, micro_batch: MicroBatch, window: Window) -> torch.Tensor:
        losses = self.objective.losses(self.models["model"], micro_batch.batch)
        return losses.sum() / window.num_samples  # right without accumulation and processes

    def train(self, accelerator: Any, window: Window, trainer: Any) -> Mapping[str, torch.Tensor]:
        model, optimizer = self.models["model"], self.optimizers["optimizer"]
        last, total = len(window.micro_batches) - 1, torch.zeros(())
        for index, micro_batch in enumerate(window.micro_batches):
            with accelerator.accumulate(model, sync_gradients=index == last):
                loss = self.loss(micro_batch, window)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total = total + loss.detach()
        return {"loss": total}


class MeanStep(OwnStep):
    def loss(self, micro_batch: MicroBatch, window: Window) -> torch.Tensor:
        return self.objective.losses(self.models["model"], micro_batch.batch).mean()


class Notes(Display):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def loop_of(folder: Path, kind: type[SupervisedStep], **options: Any) -> Loop:
    recipe = recipe_of(trainer__check_gradients=True, trainer__max_steps=3)
    return loops.build(folder, recipe, display=Notes(), kind=kind, **options)


def test_a_gradient_that_shrinks_with_accumulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loop_of(tmp_path, OwnStep).run()
    told = str(caught.value)
    assert re.search(r"OwnStep.train: the gradient of 2 micro-batches is 0.5 times that of", told)
    assert "Accelerator.backward divides by the number of micro-batches" in told
    assert "runner.optimizer_step" in told


@pytest.mark.parametrize("kind", [SupervisedStep, MeanStep])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_right_step_trains_as_if_nothing_had_been_checked(
    tmp_path: Path, kind: type[SupervisedStep], dropout: float
) -> None:
    loop = loop_of(tmp_path / "checked", kind, dropout=dropout)
    loop.run()
    assert loop.display.notes == []  # type: ignore[attr-defined]
    plain = loop_of(tmp_path / "plain", kind, dropout=dropout)
    plain.recipe.trainer.check_gradients = False
    plain.run()
    assert loops.losses(tmp_path / "checked") == loops.losses(tmp_path / "plain")
    one, other = loops.weights(tmp_path / "checked"), loops.weights(tmp_path / "plain")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_batch_statistics_are_left_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    loop = loop_of(tmp_path, MeanStep, model=model)
    loop.run()
    assert model[1].num_batches_tracked == 3  # type: ignore[union-attr]
