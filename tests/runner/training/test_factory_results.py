"""C1: right results of factories are not refused; `tests.mistakes` holds the wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from runner.data.datasets import Data
from runner.training.factory_results import check
from runner.training.run import Callback

DATASET = TensorDataset(torch.zeros(4, 1))
LINEAR = torch.nn.Linear(1, 1)


class Stream(IterableDataset[int]):
    """An iterable data set."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


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
