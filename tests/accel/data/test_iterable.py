"""The shard of a stream that each process reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from accel.data.stream import IterableDatasetShard
from accel.machine.errors import ConfigError


class Stream(IterableDataset[int]):
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __iter__(self):
        return iter(range(self.length))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


@settings(max_examples=300)
@given(
    st.integers(0, 200),
    st.integers(1, 9),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
)
def test_shares_are_whole_batches_and_hold_every_sample(
    n: int, size: int, count: int, split: bool, drop_last: bool
) -> None:
    piece = size
    size = size * count if split else size
    made = [
        IterableDatasetShard(Sized(n), size, drop_last, count, rank, split) for rank in range(count)
    ]
    found = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(samples) for samples in found]
    assert all(len(samples) % piece == 0 for samples in found)
    rounds = len(found[0]) // piece
    seen = [
        sample
        for r in range(rounds)
        for samples in found
        for sample in samples[r * piece : (r + 1) * piece]
    ]
    total = piece * count
    wanted = n // total * total if drop_last else -(-n // total) * total
    assert seen == list(itertools.islice(itertools.cycle(range(n or 1)), wanted))
    assert {shard.remainder for shard in made} == {0 if drop_last else n % total}


def test_the_documented_example() -> None:
    def share(rank: int, split: bool) -> list[int]:
        return list(IterableDatasetShard(Stream(8), 4, False, 2, rank, split))

    assert [share(0, False), share(1, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [share(0, True), share(1, True)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_short_last_round_is_left_out_or_completed() -> None:
    assert list(IterableDatasetShard(Stream(9), 2, True, 2, 1)) == [2, 3, 6, 7]
    assert list(IterableDatasetShard(Stream(9), 2, False, 2, 1)) == [2, 3, 6, 7, 1, 2]


def test_the_epoch_reaches_the_stream() -> None:
    stream = Stream(3)
    shard = IterableDatasetShard(stream, 1, False, 2, 0)
    shard.set_epoch(4)
    assert stream.epoch == 4


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=3 on 2 processes"):
        IterableDatasetShard(Stream(8), 3, False, 2, 0, split_batches=True)


@pytest.mark.parametrize("split", [False, True])
def test_an_uneven_shard_gives_each_sample_once(split: bool) -> None:
    for length in range(14):
        shards = [
            IterableDatasetShard(Sized(length), 4, False, 2, rank, split, even_batches=False)
            for rank in range(2)
        ]
        found = [list(shard) for shard in shards]
        assert sorted(found[0] + found[1]) == list(range(length))
        assert [len(shard) for shard in shards] == [len(samples) for samples in found]
        assert [shard.remainder for shard in shards] == [0, 0]
