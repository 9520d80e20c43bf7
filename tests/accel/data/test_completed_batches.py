"""Batches for a process that reads for all: their indices complete the last one."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler

from accel.data.samplers import CompletedBatchSampler, SkipBatchSampler, added_indices


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
