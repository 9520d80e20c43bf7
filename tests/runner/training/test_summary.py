"""What a run says of itself: epochs that exist, checkpoints with their steps, what is slow (R8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from accel.strategies.base import StateIO
from runner.training.run import count_parameters


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
