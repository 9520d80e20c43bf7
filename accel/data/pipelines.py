"""Torch's data pipes as streams that any rank may read.

Torch's loader shares the seed of a pipe's shuffles by a collective at each pass, which ranks that
do not read never enter, and shares a pipe out by worker only where it sees the pipe itself.
Source: https://docs.pytorch.org/docs/stable/data.html (`IterDataPipe`, `graph_settings`)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from accel.data.samplers import mix_seeds


class Pipeline(IterableDataset[Any]):
    """A data pipe in one order on every rank; its `sharding_filter` shares it out by worker.

    Args:
        pipe: the caller's.
        seed: of its shuffles, the same on every rank.
    """

    shards_by_worker = True  # as torch's loader does: without a `sharding_filter`, it repeats

    def __init__(self, pipe: IterDataPipe[Any], seed: int) -> None:
        super().__init__()
        self.pipe = pipe
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffles of the next pass.

        Args:
            epoch: its number, from 0 on.
        """
        self.epoch = epoch
        if hasattr(self.pipe, "set_epoch"):
            self.pipe.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch))
        pipe: Any = apply_random_seed(self.pipe, generator)
        worker = get_worker_info()
        if worker is not None:
            apply_sharding(pipe, worker.num_workers, worker.id)
        yield from pipe


class SizedPipeline(Pipeline):
    """A data pipe that knows how many samples it has."""

    def __len__(self) -> int:
        return len(self.pipe)


def as_stream(pipe: IterDataPipe[Any], seed: int) -> Pipeline:
    """Return a data pipe as a stream, with a length if it has one.

    Args:
        pipe: the caller's.
        seed: of its shuffles, the same on every rank.
    """
    try:
        len(pipe)
    except TypeError:
        return Pipeline(pipe, seed)
    return SizedPipeline(pipe, seed)
