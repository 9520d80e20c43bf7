"""Prepared loaders that are torchdata's `StatefulDataLoader` (where torchdata is installed)."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

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


def test_a_broken_off_pass_keeps_the_state_of_its_last_batch() -> None:
    loader = prepared()
    for number, _ in enumerate(loader):
        if number == 1:
            break
    again = prepared()
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == [4, 5]


def test_skipping_keeps_the_kind() -> None:
    skipping = skip_first_batches(prepared(), 4)
    assert isinstance(skipping, stateful.StatefulDataLoader)
    assert [batch.tolist() for batch in skipping] == [[8, 9], [10, 11]]
