"""R1, R2, R4, R8: counters that move with the batch, what improves, which ends are complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from accel.strategies.base import StateIO
from runner.training.run import count_parameters
from runner.training.state import TrainState


def test_a_position_moves_to_another_global_batch_if_it_fits() -> None:
    state = TrainState(step=3, step_in_epoch=3, samples_in_epoch=24)
    state.move_to(6)
    assert state.step_in_epoch == 4
    with pytest.raises(ConfigError, match=r"global_batch_size=5.*24 samples"):
        state.move_to(5)
    TrainState(epoch=2).move_to(5)  # at the beginning of an epoch everything fits


class Partitioned(StateIO):
    """State of a strategy that leaves an empty parameter on a rank and keeps its full size."""

    def num_elements(self, parameter: Any) -> int:
        return int(parameter.full_size)


def test_partitioned_parameters_count_in_full() -> None:
    """R8: the number of parameters does not depend on the strategy."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.full_size = 4
    accelerator = SimpleNamespace(strategy=SimpleNamespace(state=Partitioned()))
    assert count_parameters(accelerator, {"model": model}) == (4, 4)  # type: ignore[arg-type]
