"""E2: stateful loaders continue after the batch in hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard
from accel.data.prepare import prepare_data_loader, skip_first_batches

stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def prepared(dataset=range(12), workers: int = 0, **flags):
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    return prepare_data_loader(loader, use_stateful_dataloader=True, **flags)


@pytest.mark.parametrize("dataset", [range(12), Stream()])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_state_goes_on_after_the_batch_in_hand(dataset, workers: int, dispatch: bool) -> None:
    loader = prepared(dataset, workers, dispatch_batches=dispatch)
    kind = DataLoaderDispatcher if dispatch else DataLoaderShard
    assert isinstance(loader, (kind, stateful.StatefulDataLoader))
    states, batches = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert batches == [[i, i + 1] for i in range(0, 12, 2)]
    for number in (0, 2, 4):
        again = prepared(dataset, workers, dispatch_batches=dispatch)
        again.load_state_dict(states[number])
        assert [batch.tolist() for batch in again] == batches[number + 1 :]


def test_a_loader_says_whether_it_has_a_state() -> None:
    assert prepared().use_stateful_dataloader
    plain = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    assert not plain.use_stateful_dataloader
    assert plain.gradient_state.sync_gradients


def test_skipping_keeps_the_kind() -> None:
    skipping = skip_first_batches(prepared(), 4)
    assert isinstance(skipping, stateful.StatefulDataLoader)
    assert [batch.tolist() for batch in skipping] == [[8, 9], [10, 11]]


# -- dispatched rounds ---------------------------------------------------------------------------


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


# -- skipping ------------------------------------------------------------------------------------


# -- ranks at different batches ------------------------------------------------------------------
