"""Rounds of batches, the last one completed."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.data.prepare import prepare_data_loader
from accel.state import PartialState
from tests.helpers import run_distributed


class Sharded(IterableDataset):
    """Shards its numbers by worker."""

    shards_by_worker = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id, 9, info.num_workers))


def worker_ends() -> list[list[int]]:
    PartialState(cpu=True)
    original = DataLoader(Sharded(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    loader = prepare_data_loader(original)
    return [batch.tolist() for batch in loader]


def test_short_batches_of_workers_make_no_repetitions_in_between() -> None:
    main, other = run_distributed(worker_ends, 2)
    assert len(main) == len(other) == 3
    seen = [i for pair in zip(main, other, strict=True) for batch in pair for i in batch]
    assert sorted(seen[:9]) == list(range(9))
