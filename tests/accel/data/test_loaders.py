"""Prepared loaders on one process, and as one of several that are only pretended."""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
import weakref
from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from accel.data.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    PreparedLoader,
    SkipDataLoader,
)
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.data.samplers import SeedableRandomSampler
from accel.errors import ConfigError, MissingPackageError
from accel.state import GradientState

Pair = namedtuple("Pair", "left right")


class Counting(Dataset):
    """The numbers below `length`; notes what was fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def prepared(length: int, size: int, count: int = 1, rank: int = 0, drop_last=False, **flags):
    loader = DataLoader(range(length), batch_size=size, drop_last=drop_last)
    return prepare_data_loader(loader, num_processes=count, process_index=rank, **flags)


# -- the end of a pass ---------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_the_end_is_known_exactly_while_the_last_batch_is_in_hand(
    n: int, size: int, count: int, split: bool, drop_last: bool, data
) -> None:
    size = size * count if split else size
    rank = data.draw(st.integers(0, count - 1))
    loader = prepared(n, size, count, rank, drop_last, split_batches=split)
    state = GradientState()
    ends, remainders, active = [], [], []
    for _ in loader:
        ends.append(state.end_of_dataloader)
        remainders.append(state.remainder)
        active.append(state.active_dataloader is loader)
    total = size if split else size * count
    assert ends == [False] * (len(loader) - 1) + [True] * bool(len(loader))
    assert remainders[:-1] == [-1] * len(remainders[:-1])
    assert remainders[-1:] == [0 if drop_last else n % total] * bool(ends)
    assert all(active)
    assert not state.in_dataloader
    assert loader.total_batch_size == total


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_union_of_the_shares_is_the_data(
    n: int, size: int, count: int, split: bool, streamed: bool
) -> None:
    size = size * count if split else size
    dataset = Stream(n) if streamed else range(n)
    found = [
        values(
            prepare_data_loader(
                DataLoader(dataset, batch_size=size),
                num_processes=count,
                process_index=rank,
                split_batches=split,
                dispatch_batches=False,
            )
        )
        for rank in range(count)
    ]
    assert len({len(batches) for batches in found}) == 1
    seen = [i for group in zip(*found, strict=True) for batch in group for i in batch]
    assert seen[:n] == list(range(n))
    assert set(seen) == set(range(n))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_dispatched_slices_join_to_the_data(
    n: int, size: int, count: int, split: bool, even: bool, drop_last: bool
) -> None:
    size = size * count if split else size
    loaders = [
        prepare_data_loader(
            DataLoader(range(n), batch_size=size, drop_last=drop_last),
            num_processes=count,
            process_index=rank,
            split_batches=split,
            dispatch_batches=True,
            even_batches=even,
        )
        for rank in range(count)
    ]
    found, ends, remainders = [], [], set()
    for loader in loaders:
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            last = loader.end_of_dataloader, loader.remainder
            ends.append((loader.end_of_dataloader, len(batches) == len(loader)))
        if batches:
            remainders.add(last)
        assert len(loader) == len(batches)
        found.append(batches)
    seen = [
        i for group in itertools.zip_longest(*found, fillvalue=[]) for batch in group for i in batch
    ]
    total = size if split else size * count
    whole = n // total * total if drop_last else n
    assert seen[:whole] == list(range(whole))
    assert all(is_end == expected for is_end, expected in ends)
    if even or drop_last:
        assert len(seen) - whole < count
        assert len({tuple(map(len, batches)) for batches in found}) == 1
        assert remainders <= {(True, 0 if drop_last else n % total)}
    else:
        assert seen == list(range(n))


def test_nested_and_broken_off_passes_restore_the_outer_one() -> None:
    outer, inner = prepared(6, 2), prepared(4, 2)
    state = GradientState()
    for number, _ in enumerate(outer):
        for _ in inner:
            assert state.active_dataloader is inner
            break
        assert state.active_dataloader is outer
        for _ in inner:
            pass
        for _ in outer:  # the same loader again, inside itself
            pass
        assert state.end_of_dataloader == (number == 2)
        assert len(state.dataloader_references) == 2
    assert state.dataloader_references == [None]


def test_a_failing_data_set_leaves_no_active_loader() -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise OSError("disk")
            return index

    loader = prepare_data_loader(DataLoader(Broken(6), batch_size=1))
    seen = []
    with pytest.raises(OSError, match="disk"):
        seen.extend(batch.item() for batch in loader)
    assert not GradientState().in_dataloader
    iterator = iter(loader)
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk"):  # one batch ahead
        next(iterator)
    assert not GradientState().in_dataloader


def test_an_empty_data_set_gives_no_batch() -> None:
    assert values(prepared(0, 2, 2, 1)) == []
    assert values(prepare_data_loader(DataLoader(Stream(0), batch_size=2))) == []


# -- what a prepared loader is --------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"dispatch_batches": True}])
def test_prepared_loaders_are_torch_loaders_and_pickle(flags: dict) -> None:
    loader = prepared(10, 3, 2, 1, **flags)
    first = values(loader)
    copied = pickle.loads(pickle.dumps(loader))
    assert isinstance(copied, DataLoader)
    assert type(copied) is type(loader)
    assert values(copied) == first
    assert prepare_data_loader(loader) is loader


def test_a_loader_with_live_workers_pickles() -> None:
    loader = prepare_data_loader(
        DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)
    )
    assert values(loader) == [[0, 1], [2, 3]]
    assert values(pickle.loads(pickle.dumps(loader))) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("flags", [{}, {"dispatch_batches": True}])
def test_loaders_are_freed_without_the_garbage_collector(flags: dict) -> None:
    gc.disable()
    try:
        loader = prepared(8, 2, **flags)
        skipping = skip_first_batches(loader, 1)
        iterator = iter(loader)
        next(iterator)
        for _ in skipping:
            break
        references = [weakref.ref(loader), weakref.ref(skipping)]
        del iterator, loader, skipping, _
        assert [reference() for reference in references] == [None, None]
        assert GradientState().dataloader_references == [None]
    finally:
        gc.enable()


def test_arguments_of_the_loader_are_kept() -> None:
    generator = torch.Generator()
    original = DataLoader(
        range(8),
        batch_size=2,
        num_workers=2,
        timeout=5,
        prefetch_factor=3,
        persistent_workers=True,
        generator=generator,
        worker_init_fn=print,
        collate_fn=tuple,
        multiprocessing_context="spawn",
        in_order=False,
    )
    for flags in ({}, {"dispatch_batches": True}):
        loader = prepare_data_loader(original, num_processes=2, process_index=0, **flags)
        for name in ("num_workers", "timeout", "prefetch_factor", "persistent_workers", "in_order"):
            assert getattr(loader, name) == getattr(original, name)
        for name in ("generator", "worker_init_fn", "collate_fn", "multiprocessing_context"):
            assert getattr(loader, name) is getattr(original, name)


def test_a_loader_class_with_its_own_iteration_is_named() -> None:
    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    with pytest.warns(UserWarning, match="Own has an `__iter__` of its own"):
        prepare_data_loader(Own(range(3)))


def test_lengths_and_sizes() -> None:
    loader = prepared(10, 3, 2, 0)
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (2, 6, 10)
    dispatched = prepared(10, 3, 2, 0, dispatch_batches=True)
    assert (len(dispatched), dispatched.total_batch_size) == (2, 6)


# -- placement -----------------------------------------------------------------------------------


def test_batches_already_in_place_are_handed_through_untouched() -> None:
    batch = object()
    loader = DataLoader([0, 1, 2], batch_size=1, collate_fn=lambda samples: batch)
    for device in (None, torch.device("cpu")):
        ready = prepare_data_loader(loader, device=device, put_on_device=device is not None)
        assert all(item is batch for item in ready)


def test_batches_are_put_on_the_device() -> None:
    dataset = [
        {"x": torch.tensor([float(i)]), "pair": Pair(torch.tensor(i), "t")} for i in range(4)
    ]
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=2), device=torch.device("meta"), put_on_device=True
    )
    for batch in loader:
        assert batch["x"].device.type == "meta"
        assert batch["pair"].left.device.type == "meta"
        assert list(batch["pair"].right) == ["t", "t"]
    left = prepare_data_loader(DataLoader(dataset, batch_size=2), device=torch.device("meta"))
    assert next(iter(left))["x"].device.type == "cpu"


# -- order ---------------------------------------------------------------------------------------


def test_a_seedable_sampler_takes_the_place_of_a_random_one() -> None:
    torch.manual_seed(5)
    original = DataLoader(range(20), batch_size=4, shuffle=True)
    loader = prepare_data_loader(original, use_seedable_sampler=True)
    assert isinstance(loader.sampler, SeedableRandomSampler)
    assert loader.sampler.seed == 5
    assert isinstance(original.sampler, RandomSampler)
    assert not isinstance(original.sampler, SeedableRandomSampler)
    first, second = values(loader), values(loader)
    assert first != second
    loader.set_epoch(0)
    assert (values(loader), loader.epoch) == (first, 1)


def test_data_seed_decides_the_order_on_any_number_of_processes() -> None:
    def order(count: int) -> list[int]:
        original = DataLoader(range(24), batch_size=12 // count, shuffle=True)
        shares = [
            values(
                prepare_data_loader(
                    original,
                    num_processes=count,
                    process_index=rank,
                    use_seedable_sampler=True,
                    data_seed=9,
                )
            )
            for rank in range(count)
        ]
        return [i for group in zip(*shares, strict=True) for batch in group for i in batch]

    assert order(1) == order(2) == order(4)


def test_a_broken_off_pass_does_not_change_the_epoch() -> None:
    loader = prepare_data_loader(
        DataLoader(range(20), batch_size=4, shuffle=True), use_seedable_sampler=True
    )
    for _ in loader:
        break
    assert loader.epoch == 0
    values(loader)
    assert loader.epoch == 1


def test_epochs_reach_sampler_and_data_set() -> None:
    dataset = Counting(6)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=2, shuffle=True), use_seedable_sampler=True
    )
    loader.set_epoch(3)
    assert (loader.sampler.epoch, loader.batch_sampler.sampler.epoch, dataset.epochs) == (3, 3, [3])
    for number, _ in enumerate(loader):
        if number == 1:
            loader.set_epoch(7)  # the caller's choice of the next epoch holds
    assert loader.epoch == 7


def test_a_sampler_that_draws_from_the_global_generator_draws_alike_on_every_process() -> None:
    for sampler in (RandomSampler(range(12)), SubsetRandomSampler(range(12))):
        shares = []
        for rank in range(2):
            torch.manual_seed(0)  # as on two processes that were seeded alike
            loader = prepare_data_loader(
                DataLoader(range(12), batch_size=3, sampler=sampler),
                num_processes=2,
                process_index=rank,
            )
            torch.rand(rank)  # and drifted apart since
            shares.append([i for _ in range(2) for batch in values(loader) for i in batch])
        for epoch in range(2):
            seen = shares[0][epoch * 6 : epoch * 6 + 6] + shares[1][epoch * 6 : epoch * 6 + 6]
            assert sorted(seen) == list(range(12))
        assert sampler.generator is None


def test_rng_types_without_a_generator_leave_it_out() -> None:
    loader = prepared(8, 2, rng_types=["torch", "generator"])
    assert loader.rng_types == ["torch"]
    shuffled = prepare_data_loader(
        DataLoader(range(8), shuffle=True, generator=torch.Generator()), rng_types=["generator"]
    )
    assert shuffled.rng_types == ["generator"]
    assert shuffled.synchronized_generator is shuffled.sampler.generator
    assert len(values(shuffled)) == 8


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
    assert dataset.epochs == [1, 2]


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


def test_streams_that_workers_would_repeat_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=2.*get_worker_info"):
        prepare_data_loader(DataLoader(Stream(8), num_workers=2))


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
    monkeypatch.setattr("accel.imports.is_available", lambda package: False)
    with pytest.raises(MissingPackageError, match="torchdata"):
        prepare_data_loader(DataLoader(range(4)), use_stateful_dataloader=True)


def test_the_cost_of_a_batch_is_a_generator_step() -> None:
    """Count the Python functions that run per batch (a clock would be at the machine's mercy)."""
    loader = prepared(64, 1, put_on_device=True, device=torch.device("cpu"))
    iterator = iter(loader)
    next(iterator)
    calls = []
    own = PreparedLoader.__module__.rpartition(".")[0]

    def note(frame, event, _) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(own):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    for _ in range(10):
        next(iterator)
    sys.setprofile(None)
    assert calls == ["__iter__"] * 10
