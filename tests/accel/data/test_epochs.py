"""Data sets whose epoch the caller chooses, past the loader."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.data.prepare import prepare_data_loader
from accel.state import PartialState


class Epochs(IterableDataset[int]):
    """Two samples: the epoch, kept as a number or in memory that workers share."""

    def __init__(self, shared: bool = False) -> None:
        self.epoch = torch.zeros((), dtype=torch.int64) if shared else 0

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.epoch, torch.Tensor):
            self.epoch.fill_(epoch)
        else:
            self.epoch = epoch

    def __iter__(self):
        return iter([int(self.epoch)] * 2)


def read(loader) -> list[int]:
    return [i for batch in loader for i in batch.tolist()]


def loader_of(dataset: Epochs) -> DataLoader:
    PartialState(cpu=True)
    return prepare_data_loader(DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize("shared", [False, True])
def test_an_epoch_that_the_caller_tells_the_data_set_holds(shared: bool) -> None:
    dataset = Epochs(shared)
    loader = loader_of(dataset)
    for epoch in (3, 4, 9):
        dataset.set_epoch(epoch)
        assert read(loader) == [epoch] * 2
    assert read(loader) == [10] * 2  # nobody told it another
    loader.set_epoch(2)
    assert (read(loader), loader.epoch) == ([2] * 2, 3)


def test_an_epoch_that_another_loader_told_is_not_taken_over() -> None:
    dataset = Epochs()
    train, other = loader_of(dataset), loader_of(dataset)
    train.set_epoch(5)
    assert (read(train), read(other), read(train)) == ([5] * 2, [0] * 2, [6] * 2)
    del train, other
    gc.collect()
    assert read(loader_of(dataset)) == [0] * 2  # of a later run over the same data


def test_the_epoch_of_a_resumed_pass_holds() -> None:
    dataset = Epochs()
    loader = loader_of(dataset)
    dataset.set_epoch(4)
    for _ in loader:
        saved = loader.order_state()  # the last batch is in hand
    dataset.set_epoch(0)
    loader.load_order_state(saved)
    assert read(loader) == [5] * 2
