"""Skipping batches, and preparing unusual loaders."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from accel.data.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
)
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.machine.errors import ConfigError, MissingPackageError
from tests.accel.data.parts import Counting, Stream, prepared, values

# -- skipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_skipping_map_data_fetches_nothing(count: int, split: bool, dispatch: bool) -> None:
    dataset = Counting(23)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=4, shuffle=True),
        num_processes=count,
        process_index=count - 1,
        split_batches=split,
        dispatch_batches=dispatch,
        use_seedable_sampler=True,
    )
    everything = values(loader)
    loader.set_epoch(0)
    dataset.fetched.clear()
    skipping = skip_first_batches(loader, 2)
    left = []
    for batch in skipping:
        left.append(batch.tolist())
        end, remainder = skipping.end_of_dataloader, skipping.remainder
    assert left == everything[2:]
    assert len(skipping) == len(left)
    assert not set(dataset.fetched) & {i for batch in everything[:2] for i in batch}
    assert (end, remainder) == (True, 23 % loader.total_batch_size)
    assert type(skipping) is type(loader)


def test_skipping_keeps_the_epoch_and_counts_it_on() -> None:
    loader = prepare_data_loader(
        DataLoader(range(20), batch_size=4, shuffle=True), use_seedable_sampler=True, data_seed=1
    )
    orders = [values(loader) for _ in range(4)]
    loader.set_epoch(2)
    assert values(skip_first_batches(loader, 3)) == orders[2][3:]
    assert values(loader) == orders[3]


def test_skipping_counts_the_epoch_of_loaders_without_a_seedable_sampler() -> None:
    dataset = Counting(6)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=2))
    values(skip_first_batches(loader, 1))
    assert loader.epoch == 1
    values(loader)
    assert dataset.epochs == [0, 1]


@pytest.mark.parametrize("dispatch", [False, True])
def test_skipping_a_stream(dispatch: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(Stream(11), batch_size=2),
        num_processes=2,
        process_index=1,
        dispatch_batches=dispatch,
    )
    everything = values(loader)
    skipping = skip_first_batches(skip_first_batches(loader, 1), 1)
    assert values(skipping) == everything[2:]


def test_skipping_plain_loaders() -> None:
    dataset = Counting(7)
    plain = skip_first_batches(DataLoader(dataset, batch_size=2), 2)
    assert type(plain) is DataLoader
    assert (values(plain), dataset.fetched, len(plain)) == ([[4, 5], [6]], [4, 5, 6], 2)
    stream = skip_first_batches(skip_first_batches(DataLoader(Stream(7), batch_size=2), 1), 1)
    assert isinstance(stream, SkipDataLoader)
    assert values(stream) == [[4, 5], [6]]
    single = DataLoader(dataset, batch_size=None)
    assert [int(i) for i in skip_first_batches(single, 5)] == [5, 6]


def test_skipping_nothing_too_much_or_backwards() -> None:
    loader = prepared(6, 2)
    assert skip_first_batches(loader, 0) is loader
    assert values(skip_first_batches(loader, 9)) == []
    with pytest.raises(ConfigError, match="num_batches=-1"):
        skip_first_batches(loader, -1)


def test_a_shard_built_by_hand_skips() -> None:
    loader = DataLoaderShard(range(8), skip_batches=2, batch_size=2)
    assert (values(loader), len(loader)) == ([[4, 5], [6, 7]], 2)
    assert values(skip_first_batches(loader, 1)) == [[6, 7]]


# -- unusual loaders -----------------------------------------------------------------------------


def test_loaders_that_do_not_batch_are_shared_out() -> None:
    def shares(loader: DataLoader) -> list[list]:
        return [
            [
                batch.tolist() if isinstance(batch, torch.Tensor) else batch
                for batch in prepare_data_loader(loader, num_processes=2, process_index=rank)
            ]
            for rank in range(2)
        ]

    assert shares(DataLoader(range(5), batch_size=None)) == [[0, 2, 4], [1, 3, 0]]
    batches = BatchSampler(SequentialSampler(range(6)), 2, False)
    data = TensorDataset(torch.arange(6))
    loader = DataLoader(data, batch_size=None, sampler=batches, collate_fn=lambda b: b[0])
    assert shares(loader) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def test_streams_of_whole_batches_are_shared_out() -> None:
    class Batches(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(8).split(2))

    loader = DataLoader(Batches(), batch_size=None)
    shares = [
        values(
            prepare_data_loader(loader, num_processes=2, process_index=r, dispatch_batches=False)
        )
        for r in range(2)
    ]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_streams_are_dispatched_where_there_are_several_processes() -> None:
    loader = DataLoader(Stream(8), batch_size=2)
    assert isinstance(prepare_data_loader(loader), DataLoaderShard)
    assert isinstance(prepare_data_loader(loader, num_processes=2), DataLoaderDispatcher)
    assert isinstance(prepare_data_loader(loader, dispatch_batches=True), DataLoaderDispatcher)


def test_workers_of_streams_are_warned_of_or_refused() -> None:
    stream = Stream(8)
    with pytest.warns(UserWarning, match=r"num_workers=2.*does not declare `shards_by_worker`"):
        prepare_data_loader(DataLoader(stream, num_workers=2))
    stream.shards_by_worker = False
    with pytest.raises(ConfigError, match=r"num_workers=2.*get_worker_info"):
        prepare_data_loader(DataLoader(stream, num_workers=2))


def test_batches_that_do_not_split_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=3 on 2 processes"):
        prepare_data_loader(DataLoader(range(6), batch_size=3), num_processes=2, split_batches=True)


def test_dispatched_batches_may_hold_strings_and_mappings() -> None:
    dataset = [UserDict(x=torch.tensor(i), name=f"n{i}", kind="k") for i in range(6)]

    def collate(samples):
        return UserDict(
            x=torch.stack([s["x"] for s in samples]), name=[s["name"] for s in samples], kind="k"
        )

    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=2, collate_fn=collate),
        num_processes=2,
        process_index=1,
        dispatch_batches=True,
    )
    batches = list(loader)
    assert isinstance(batches[0], UserDict)
    assert [b["name"] for b in batches] == [["n2", "n3"], ["n5"]]
    assert [b["x"].tolist() for b in batches] == [[2, 3], [5]]
    assert batches[0]["kind"] == "k"


def test_a_slice_function_of_the_caller_cuts() -> None:
    calls = []

    def cut(batch, tensor_slice, process_index=None, num_processes=None):
        calls.append((tensor_slice, process_index, num_processes))
        return batch[tensor_slice] * 10

    loader = prepared(
        8, 2, 2, 1, dispatch_batches=True, slice_fn_for_dispatch=cut, split_batches=True
    )
    assert values(loader) == [[10], [30], [50], [70]]
    assert calls[0] == (slice(1, 2), 1, 2)


def test_batches_without_a_length_are_not_dispatched() -> None:
    loader = DataLoader(range(4), collate_fn=lambda samples: {"n": 3})
    ready = prepare_data_loader(loader, dispatch_batches=True)
    with pytest.raises(ConfigError, match="one entry per sample"):
        list(ready)


def test_a_stateful_loader_wants_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda package: False)
    with pytest.raises(MissingPackageError, match="torchdata"):
        prepare_data_loader(DataLoader(range(4)), use_stateful_dataloader=True)


def test_batches_to_skip_are_a_whole_number() -> None:
    for wrong in ("2", 1.5, None):
        with pytest.raises(ConfigError, match=r"num_batches=.*: it is a whole number"):
            skip_first_batches(DataLoader(range(4)), wrong)  # type: ignore[arg-type]
