"""E2: stateful loaders continue after the batch in hand."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard
from accel.data.prepare import prepare_data_loader, skip_first_batches
from tests.accel.data.parts import Stream

stateful = pytest.importorskip("torchdata.stateful_dataloader")


def prepared(dataset=range(12), workers: int = 0, **flags):
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    return prepare_data_loader(loader, use_stateful_dataloader=True, **flags)


@pytest.mark.parametrize("dataset", [range(12), Stream(12)])
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


class Counted(IterableDataset):
    """The numbers below 11; knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 11:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def read(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


# -- ranks at different batches ------------------------------------------------------------------


def named(samples: list[int]) -> dict[str, Any]:
    return {"id": torch.tensor(samples), "name": [str(s) for s in samples], "kind": "numbers"}


def of_two(dataset: Any, rank: int, collate: Any = None, **arguments: Any) -> Any:
    """Return rank `rank`'s loader of two, which reads in this process."""
    original = DataLoader(dataset, batch_size=2, collate_fn=collate, **arguments)
    return prepare_data_loader(
        original,
        num_processes=2,
        process_index=rank,
        dispatch_batches=True,
        use_stateful_dataloader=True,
    )


@pytest.mark.parametrize("kind", [partial(Stream, 11), Counted])
@pytest.mark.parametrize("collate", [None, named])
def test_a_resumed_stream_completes_its_last_round_with_the_first_samples(kind, collate) -> None:
    loader = of_two(kind(), 1, collate)
    batches, states = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    last = batches[-1]["id"] if collate else batches[-1]
    assert (len(batches), last) == (3, [10, 0])
    for number, state in enumerate(states):
        again = of_two(kind(), 1, collate)
        again.load_state_dict(state)
        assert read(again) == (batches[number + 1 :] or batches)
        assert read(again) == batches  # and the next pass is whole


@pytest.mark.parametrize("dataset", [range(12), Stream(12)])
def test_skipping_takes_the_place_of_a_loaded_position(dataset) -> None:
    loader = prepared(dataset)
    next(iter(loader))
    state = loader.state_dict()
    again = prepared(dataset)
    again.load_state_dict(state)
    assert read(skip_first_batches(again, 1)) == [[i, i + 1] for i in range(2, 12, 2)]
    assert read(again) == [[i, i + 1] for i in range(0, 12, 2)]
