"""R1, R2, R4, R8: counters that move with the batch, what improves, which ends are complete."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from accel.strategies.base import StateIO
from runner.training.run import count_parameters
from runner.training.state import Stop, TrainState


@pytest.mark.parametrize(
    ("best", "value", "mode", "better"),
    [
        (None, 1.0, "max", True),
        (1.0, 2.0, "max", True),
        (1.0, 2.0, "min", False),
        (1.0, 1.0, "max", False),
        (None, math.nan, "max", False),
    ],
)
def test_what_improves(best: float | None, value: float, mode: str, better: bool) -> None:
    assert TrainState(best=best).improves(value, mode) is better


def test_a_position_moves_to_another_global_batch_if_it_fits() -> None:
    state = TrainState(step=3, step_in_epoch=3, samples_in_epoch=24)
    state.move_to(6)
    assert state.step_in_epoch == 4
    with pytest.raises(ConfigError, match=r"global_batch_size=5.*24 samples"):
        state.move_to(5)
    TrainState(epoch=2).move_to(5)  # at the beginning of an epoch everything fits


def test_which_ends_are_complete() -> None:
    kinds = ("max_steps", "epochs", "max_time", "callback", "stop_after", "signal")
    assert [kind for kind in kinds if Stop(kind, "").complete] == list(kinds[:4])


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
