"""C1: an object of the wrong kind that a factory returns is refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.training.factory_results import check, check_trainable
from runner.training.run import Callback

DATASET = TensorDataset(torch.zeros(4, 1))
LINEAR = torch.nn.Linear(1, 1)


class Stream(IterableDataset[int]):
    """An iterable data set."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Misspelt(Callback):
    """Its method is never called."""

    def on_evaluated(self, loop: Any, split: str, metrics: Any) -> None: ...


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", LINEAR),
        ("data", Data(DATASET, [1, 2])),  # type: ignore[arg-type]
        ("data", Data(Stream())),
        ("optimizer", torch.optim.SGD(LINEAR.parameters())),
        ("scheduler", torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LINEAR.parameters()), 1)),
        ("callbacks.mine", Callback()),
    ],
)
def test_right_results_pass(key: str, value: Any) -> None:
    check(key, "place", value)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    check_trainable("place", LINEAR)
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match="returned a Linear: it has no trainable parameters"):
        check_trainable("place", frozen)
