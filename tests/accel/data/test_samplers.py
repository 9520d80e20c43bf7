"""E2: samplers give each index to one rank, in an order that follows from seed and epoch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from accel.data.order import Order
from accel.data.order_across_ranks import AgreedSampler
from accel.data.samplers import (
    BatchSamplerShard,
    CompletedBatchSampler,
    SamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    added_indices,
    set_sampler_epoch,
    total_batch_size,
)
from accel.machine.errors import ConfigError


def shards(n: int, size: int, count: int, drop_last: bool, **flags: bool) -> list[list[list[int]]]:
    made = [
        BatchSamplerShard(
            BatchSampler(SequentialSampler(range(n)), size, drop_last), count, rank, **flags
        )
        for rank in range(count)
    ]
    found = [list(shard) for shard in made]
    for shard, batches in zip(made, found, strict=True):
        assert len(shard) == len(batches)
    return found


LENGTH = st.integers(0, 200)
SIZE = st.integers(1, 9)
COUNT = st.integers(1, 8)


@settings(max_examples=300)
@given(LENGTH, SIZE, COUNT, st.booleans())
def test_even_batches_complete_the_last_round_from_the_beginning(
    n: int, size: int, count: int, split: bool
) -> None:
    piece = size
    size = size * count if split else size
    found = shards(n, size, count, False, split_batches=split, even_batches=True)
    rounds = [list(itertools.chain(*group)) for group in zip(*found, strict=True)]
    seen = list(itertools.chain(*rounds))
    assert all(len(batch) == piece for batches in found for batch in batches)
    wanted = -(-n // (piece * count)) * piece * count
    assert seen == list(itertools.islice(itertools.cycle(range(n)), wanted)) if n else seen == []


@settings(max_examples=300)
@given(LENGTH, SIZE, COUNT, st.booleans(), st.booleans())
def test_drop_last_keeps_whole_rounds_only(
    n: int, size: int, count: int, split: bool, even: bool
) -> None:
    piece = size
    size = size * count if split else size
    found = shards(n, size, count, True, split_batches=split, even_batches=even)
    seen = [i for group in zip(*found, strict=True) for batch in group for i in batch]
    assert seen == list(range(n // (piece * count) * piece * count))


@settings(max_examples=300)
@given(LENGTH, SIZE, COUNT, st.booleans())
def test_uneven_batches_hold_each_index_once(n: int, size: int, count: int, split: bool) -> None:
    size = size * count if split else size
    found = shards(n, size, count, False, split_batches=split, even_batches=False)
    seen = [
        index
        for group in itertools.zip_longest(*found, fillvalue=[])
        for batch in group
        for index in batch
    ]
    assert seen == list(range(n))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@settings(max_examples=200)
@given(LENGTH, SIZE, COUNT, st.booleans(), st.booleans(), st.booleans())
def test_remainder_counts_the_real_samples_of_the_last_round(
    n: int, size: int, count: int, split: bool, even: bool, drop_last: bool
) -> None:
    size = size * count if split else size
    inner = BatchSampler(SequentialSampler(range(n)), size, drop_last)
    shard = BatchSamplerShard(inner, count, 0, split, even)
    assert shard.remainder == -1
    list(shard)
    total = size if split else size * count
    assert shard.remainder == (n % total if even and not drop_last else 0)
    assert total_batch_size(SkipBatchSampler(shard, 1)) == total


def test_the_documented_examples() -> None:
    inner = BatchSampler(SequentialSampler(range(8)), 4, False)
    assert list(BatchSamplerShard(inner, 2, 0)) == [[0, 1, 2, 3]]
    assert list(BatchSamplerShard(inner, 2, 1)) == [[4, 5, 6, 7]]
    assert list(BatchSamplerShard(inner, 2, 0, split_batches=True)) == [[0, 1], [4, 5]]
    assert list(BatchSamplerShard(inner, 2, 1, split_batches=True)) == [[2, 3], [6, 7]]


def test_uneven_batches_are_left_as_they_are() -> None:
    inner = BatchSampler(SequentialSampler(range(7)), 2, False)
    found = [list(BatchSamplerShard(inner, 3, rank, even_batches=False)) for rank in range(3)]
    assert found == [[[0, 1], [6]], [[2, 3]], [[4, 5]]]
    assert [BatchSamplerShard(inner, 3, rank).total_length for rank in range(3)] == [4] * 3


class Bare(Sampler[list[int]]):
    """A batch sampler with neither `batch_size` nor `drop_last`, of batches that vary."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


def test_a_sampler_without_batch_size_is_shared_out_or_not_split() -> None:
    for use in (len, list):
        with pytest.raises(ConfigError, match=r"without `batch_size`.*split_batches=False"):
            use(BatchSamplerShard(Bare([3, 1, 2]), 2, 0, split_batches=True))
    shard = BatchSamplerShard(Bare([3, 1, 2]), 2, 0)
    shard.num_processes = 1  # as libraries do, whose sampler deals batches itself
    assert (len(shard), list(shard), shard.remainder) == (3, [[0, 1, 2], [3], [4, 5]], 0)
    found = [list(BatchSamplerShard(Bare([3, 1, 2]), 2, r, even_batches=False)) for r in (0, 1)]
    assert found == [[[0, 1, 2], [4, 5]], [[3]]]


def test_even_batches_refuse_a_short_batch_in_the_middle() -> None:
    sampler = Bare([3, 1, 3, 3])
    sampler.batch_size = 3
    alone: Any = None
    for one in (sampler, AgreedSampler(sampler, Order(), alone, None)):
        message = r"sampler Bare, whose batches vary in size.*even_batches=False"
        with pytest.raises(ConfigError, match=message):
            list(BatchSamplerShard(one, 2, 0))


def test_a_batch_that_does_not_split_names_the_nearest_sizes() -> None:
    inner = BatchSampler(SequentialSampler(range(8)), 5, False)
    with pytest.raises(ConfigError, match=r"batch_size=5 on 4 processes.*4 or 8"):
        BatchSamplerShard(inner, 4, 0, split_batches=True)


# -- order ---------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(LENGTH, COUNT, st.booleans())
def test_single_indices_are_dealt_out(n: int, count: int, even: bool) -> None:
    found = [list(SamplerShard(SequentialSampler(range(n)), count, r, even)) for r in range(count)]
    seen = [i for group in itertools.zip_longest(*found) for i in group if i is not None]
    assert sorted(set(seen)) == list(range(n))
    assert (len({len(indices) for indices in found}) == 1) or not even


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(50), data_seed=3)
    first = list(sampler)
    torch.rand(7)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    again = SeedableRandomSampler(range(50), data_seed=3)
    again.set_epoch(1)
    assert list(again) == list(sampler)
    again.load_state_dict({"seed": 3, "epoch": 0, "is_mixed": False})
    assert list(again) == first
    assert sorted(first) == list(range(50))


def test_the_order_is_that_of_torch_for_the_sum_of_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(50), data_seed=3)
    sampler.set_epoch(4)
    expected = torch.randperm(50, generator=torch.Generator().manual_seed(7))
    assert list(sampler) == expected.tolist()


def test_an_epoch_reaches_every_sampler_inside() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=4)
    shard = BatchSamplerShard(BatchSampler(sampler, 2, False), 2, 0)
    set_sampler_epoch(SkipBatchSampler(shard, 1), 7)
    assert sampler.epoch == 7


@pytest.mark.parametrize(
    ("length", "size", "count", "expected", "added"),
    [
        (5, 2, 2, [[0, 1], [2, 3], [4, 0]], 1),
        (4, 2, 2, [[0, 1], [2, 3]], 0),
        (4, 4, 3, [[0, 1, 2, 3], [0, 1]], 2),  # in a batch more
        (1, 4, 3, [[0, 0, 0]], 2),
    ],
)
def test_the_first_indices_complete_the_last_batch(
    length: int, size: int, count: int, expected: list[list[int]], added: int
) -> None:
    sampler = CompletedBatchSampler(BatchSampler(range(length), size, False), count)
    assert (len(sampler), list(sampler), added_indices(sampler)) == (len(expected), expected, added)
    skipping = SkipBatchSampler(sampler, 1)
    assert list(skipping) == expected[1:]
    assert added_indices(skipping) == added
    sampler.even_batches = False
    assert list(sampler) == list(BatchSampler(range(length), size, False))
