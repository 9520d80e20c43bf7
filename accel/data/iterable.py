"""The shard of an iterable data set that one process reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from accel.data.samplers import cycle_to
from accel.data.split_batches import split_problems
from accel.data.stream_digests import FirstRound
from accel.machine.errors import ConfigError


class Rest:
    """What a loader worker has left at the end of its part of a stream.

    Attributes:
        worker: its number.
        real: how many samples its last round has, of those of all ranks.
        samples: these, and behind them repetitions that complete a round where they are wanted.
            Empty where the worker gave the round itself.
        packed: they are pickled, on the way to the loader.
        why: they cannot be pickled; `samples` are batches then. None: they can.
    """

    def __init__(self, worker: int, real: int, samples: list[object]) -> None:
        self.worker, self.real, self.samples = worker, real, samples
        self.packed = b""
        self.why: str | None = None


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of those of an iterable data set.

    Every process reads the full stream and keeps its own samples, full batches of them. The last
    round is completed with samples from the beginning, or dropped with `drop_last`; without
    `even_batches` each process gets what there is for it, some a short batch or none. Where several
    loader workers divide the stream, prepared loaders join what these have left at their ends; a
    plain loader completes the last round of each.

    Args:
        dataset: the stream, the same on every process.
        batch_size: samples per batch of one process; with `split_batches`, of all together.
        drop_last: whether a last round that is too small is dropped.
        num_processes: number of shards of the stream.
        process_index: which of them this one is.
        split_batches: whether `batch_size` counts the samples of all processes.
        even_batches: whether the last round is completed.

    Attributes:
        remainder: after a complete pass in this process, or by workers of a prepared loader, how
            many samples of the last round over all processes are real; 0 where all are. -1 before.
        hands_over: whether a loader worker gives a `Rest` for what it has left, as a batch.
        first_round: records the first samples, until ranks have compared them; None: they are not
            recorded.

    Raises:
        ConfigError: if the batch size cannot be split.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches:
            ConfigError.raise_if(split_problems(batch_size, num_processes))
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.remainder = -1
        self.hands_over = False
        self.first_round: FirstRound | None = None

    @property
    def round_size(self) -> int:
        """How many samples all processes together read in a full round."""
        return self.batch_size * (1 if self.split_batches else self.num_processes)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.round_size)
        size = self.round_size // self.num_processes
        if self.drop_last or not rest:
            return full * size
        if self.even_batches:
            return (full + 1) * size
        return full * size + len(range(*self._mine().indices(rest)))

    def _mine(self) -> slice:
        size = self.round_size // self.num_processes
        return slice(self.process_index * size, (self.process_index + 1) * size)

    def __iter__(self) -> Iterator[Any]:
        size, mine, noted = self.round_size, self._mine(), self.first_round
        worker = get_worker_info() if self.hands_over else None
        if noted is not None:
            noted.begin()
        stream = iter(self.dataset)
        first: list[object] = []
        rest: Rest | None = None
        real = 0
        while samples := list(itertools.islice(stream, size)):
            if noted is not None and not first:
                noted.note(samples)
            first = first or samples
            if len(samples) < size:
                found = len(samples)
                completes = self.even_batches and not self.drop_last
                repeated = cycle_to(first, size - found) if completes else []
                if worker is not None and worker.num_workers > 1:
                    rest = Rest(worker.id, found, samples + repeated)
                    break
                if self.drop_last:
                    break
                if completes:
                    real = found
                    samples += repeated
            yield from samples[mine]
        if noted is not None and not first:
            noted.note([])
        if worker is not None and real:
            rest = Rest(worker.id, real, [])
        if rest is not None:  # in each place of a batch
            yield from itertools.repeat(rest, size // self.num_processes)
        self.remainder = real  # at the end: a pass inside this one must not disturb it

    def cut(self, samples: list[object], repeated: list[object]) -> Iterator[list[object]]:
        """Yield the batches of this process out of rounds of the last samples of a pass.

        Args:
            samples: of all processes.
            repeated: what completes the last round, where it is completed: at least as many.
        """
        size, mine = self.round_size, self._mine()
        for start in range(0, len(samples), size):
            found = samples[start : start + size]
            if len(found) < size:
                if self.drop_last:
                    return
                found += repeated[: size - len(found)]
            if found[mine]:
                yield found[mine]

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to the data set, if it wants it.

        Args:
            epoch: number of the next pass, from 0 on.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
