"""Batches that one process reads for all, completed by their indices."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import BatchSampler

from accel.data.samplers import AroundBatchSampler, cycle_to, samplers


class CompletedBatchSampler(AroundBatchSampler, BatchSampler):
    """The batches of another sampler, completed to a multiple of the number of processes.

    For batches that one process reads for all: what completes the last round is then known by its
    indices, so that a pass that skips batches ends with the same samples as a complete one.

    Args:
        batch_sampler: yields lists of at most `batch_size` indices.
        num_processes: the number of indices yielded is a multiple of it.

    Attributes:
        even_batches: whether it completes them at all.
        added: after a complete pass, how many indices were added at its end.
    """

    def __init__(self, batch_sampler: BatchSampler, num_processes: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.batch_size = batch_sampler.batch_size
        self.drop_last = False
        self.even_batches = True
        self.added = 0

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if not self.even_batches or not length or not hasattr(self.sampler, "__len__"):
            return length
        completed = -(-len(self.sampler) // self.num_processes) * self.num_processes
        return max(length, -(-completed // self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        return self.entries(iter(self.batch_sampler))

    def entries(self, inner: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yield the batches, given those of the sampler inside."""
        seen = 0
        head: list[int] = []
        batch: list[int] = []
        for following in inner:
            head += following[: self.num_processes - len(head)]
            if batch:
                yield batch
            batch = following
            seen += len(batch)
        added = -seen % self.num_processes if self.even_batches else 0
        batch = [*batch, *cycle_to(head, added)]
        for start in range(0, len(batch), self.batch_size):
            yield batch[start : start + self.batch_size]
        self.added = added


def added_indices(sampler: object) -> int:
    """Return how many indices at the end of a pass only complete the last round."""
    found = (inner for inner in samplers(sampler) if isinstance(inner, CompletedBatchSampler))
    return next((inner.added for inner in found), 0)
