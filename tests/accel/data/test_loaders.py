"""Prepared loaders on one process, and as one of several that are only pretended (E2)."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler

from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard, PreparedLoader, SkipDataLoader
from accel.data.prepare import prepare_data_loader
from accel.machine.errors import ConfigError
from accel.state import GradientState
from tests.accel.data.parts import Counting, Stream, prepared, values

# -- the end of a pass ---------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.integers(0, 200),
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


# -- what a prepared loader is --------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [range(10), Stream(10)])
@pytest.mark.parametrize("dispatch", [False, True])
def test_prepared_loaders_are_torch_loaders_and_pickle(dataset, dispatch: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=3),
        num_processes=2,
        process_index=1,
        dispatch_batches=dispatch,
    )
    first = values(loader)
    copied = pickle.loads(pickle.dumps(loader))
    assert isinstance(copied, DataLoader)
    assert type(copied) is type(loader)
    assert values(copied) == first
    assert prepare_data_loader(loader) is loader


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


# -- order ---------------------------------------------------------------------------------------


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


# -- loops by hand -------------------------------------------------------------------------------


def test_the_iteration_is_the_epoch() -> None:
    given = DataLoader(range(4), batch_size=2, shuffle=True)
    loader = prepare_data_loader(given, use_seedable_sampler=True, data_seed=1)
    orders = [values(loader) for _ in range(2)]
    assert loader.iteration == loader.epoch == 2
    loader.iteration = 1
    assert loader.iteration == 1
    assert values(loader) == orders[1]


def test_the_sampler_is_read_and_replaced() -> None:
    loader = prepared(4, 2)
    assert isinstance(loader.get_sampler(), SequentialSampler)
    loader.set_sampler(SubsetRandomSampler([3]))
    assert isinstance(loader.get_sampler(), SubsetRandomSampler)
    assert loader.sampler is loader.get_sampler()
    assert values(loader) == [[3]]
    shard = prepared(8, 2, count=2, rank=1)
    shard.set_sampler([7, 6, 5, 4, 3, 2, 1, 0])
    assert values(shard) == [[5, 4], [1, 0]]
    stream = prepare_data_loader(DataLoader(Stream(4), batch_size=2))
    with pytest.raises(ConfigError, match="set_sampler"):
        stream.set_sampler([0])


def test_a_pass_by_hand_makes_the_loader_active() -> None:
    loader, state = prepared(4, 2), GradientState()
    loader.end_of_dataloader, loader.remainder = True, 3
    loader.begin()
    assert state.active_dataloader is loader
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)
    loader.remainder = 3
    loader.end()
    assert state.active_dataloader is None
    loader.reset()
    assert loader.remainder == -1


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_begins_at_an_iteration(kind: type[PreparedLoader]) -> None:
    assert kind(range(4), iteration=3).iteration == 3
    assert kind(range(4)).iteration == 0


def test_the_torch_loader_is_the_prepared_one() -> None:
    loader = prepared(6, 2)
    for one in (loader, loader._skipping(1), SkipDataLoader(range(4), batch_size=2)):
        assert one.base_dataloader is one
        assert isinstance(one.base_dataloader, DataLoader)
