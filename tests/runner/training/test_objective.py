"""What an objective may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel.accelerator import Accelerator
from accel.machine.errors import ConfigError
from runner.data.micro_batch_window import MicroBatch, Window
from runner.recipe.schema import Trainer
from tests.runner.training.test_step import NUM_SAMPLES, Regression, make_step, samples


class MeanRegression(Regression):
    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().losses(model, batch).mean()


def test_a_loss_that_is_not_per_sample_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    step = make_step(accelerator, MeanRegression())
    window = Window([MicroBatch(samples())], NUM_SAMPLES)
    with pytest.raises(ConfigError, match=r"MeanRegression.losses returned shape \[\]"):
        step.train(accelerator, window, Trainer())
