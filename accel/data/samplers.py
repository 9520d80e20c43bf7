"""Samplers: who reads which indices, in an order that is a function of seed and epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from accel.comm.rng import mix_seeds
from accel.machine.errors import ConfigError, Problem, Problems


def split_problems(batch_size: int, num_processes: int) -> list[Problem]:
    """Return what is wrong with cutting batches of `batch_size` into `num_processes` pieces."""
    if batch_size % num_processes == 0:
        return []
    below = batch_size - batch_size % num_processes
    sizes = [str(size) for size in (below, below + num_processes) if size > 0]
    return [
        Problem(
            f"split_batches=True with batch_size={batch_size} on {num_processes} processes",
            "the batch size divides by the number of processes",
            f"The nearest batch size: {' or '.join(sizes)}.",
        )
    ]


def unknown_size(name: str) -> Problem:
    """Return what is wrong with cutting the batches of a batch sampler of class `name`."""
    return Problem(
        f"batch sampler {name} without `batch_size`",
        "to split batches is to know the size of a full one",
        "Give the sampler an attribute `batch_size`, or set split_batches=False.",
    )


SliceFunction = Callable[..., Any]  # documented `slice_fn`: its part of a batch for a process
_LOADER_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "snapshot_every_n_steps",  # StatefulDataLoader
)


def loader_arguments(loader: DataLoader[object]) -> dict[str, Any]:
    """Return the arguments that build a loader like `loader`, without data set and samplers."""
    found = {name: getattr(loader, name) for name in _LOADER_ARGUMENTS if hasattr(loader, name)}
    if not found.get("pin_memory_device"):
        found.pop("pin_memory_device", None)
    if isinstance(loader.dataset, IterableDataset):
        found.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return found


def index_sampler(loader: DataLoader[object]) -> Any:
    """Return what yields a loader's indices: its batch sampler, or its sampler without one."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def index_arguments(loader: DataLoader[object], sampler: object) -> dict[str, Any]:
    """Return the arguments that make `sampler` yield the indices of a loader like `loader`."""
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": sampler}
    return {"batch_sampler": sampler}


T = TypeVar("T")


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of only (seed, epoch).

    Iterating twice gives the same order until `set_epoch` is called; prepared loaders call it at
    the end of each pass. The order is torch's for the sum of seed and epoch, as that of the
    documented class: a library that resumes by skipping as many batches goes on where it was,
    also where the documented package had drawn the first ones.

    Args:
        args: of `torch.utils.data.RandomSampler`.
        data_seed: the seed; None takes the initial seed of `generator`, or of torch's own.
        is_mixed: whether seed and epoch are mixed instead, so that (seed 0, epoch 1) and (seed 1,
            epoch 0) have different orders.
        kwargs: of `torch.utils.data.RandomSampler`.

    Attributes:
        seed: the seed in use.
        epoch: the epoch whose order the next pass has.
        is_mixed: as given, or as in the state that was loaded.
    """

    def __init__(
        self, *args: Any, data_seed: int | None = None, is_mixed: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if data_seed is None:
            source = self.generator if self.generator is not None else torch.default_generator
            data_seed = source.initial_seed()
        self.seed = int(data_seed)
        self.epoch = 0
        self.is_mixed = is_mixed
        self.generator = None  # passes make their own

    def __iter__(self) -> Iterator[int]:
        seed = mix_seeds(self.seed, self.epoch) if self.is_mixed else self.seed + self.epoch
        # A generator per pass, so that passes that overlap do not disturb each other.
        draw = RandomSampler(
            self.data_source,
            self.replacement,
            self._num_samples,
            torch.Generator().manual_seed(seed),
        )
        return iter(draw)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has.

        Args:
            epoch: its number, from 0 on.
        """
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return what decides the order."""
        return {"seed": self.seed, "epoch": self.epoch, "is_mixed": self.is_mixed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what decides the order.

        Args:
            state: what `state_dict` returned.
        """
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self.is_mixed = bool(state["is_mixed"])


class AroundBatchSampler:
    """The base of samplers that draw from a batch sampler."""

    batch_sampler: Any

    @property
    def sampler(self) -> Any:
        """The sampler of indices inside the batch sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: object) -> None:
        self.batch_sampler.sampler = sampler


class SameBatchSize(AroundBatchSampler):
    """The base of those whose batches are as large as the batch sampler's."""

    @property
    def batch_size(self) -> int | None:
        """The batch size of the sampler inside."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether the sampler inside drops a short last batch."""
        return bool(getattr(self.batch_sampler, "drop_last", False))


class SkipBatchSampler(SameBatchSize, Sampler[object]):
    """A sampler without the first `skip_batches` entries of another; nothing is fetched for them.

    Args:
        batch_sampler: a batch sampler (or any sampler).
        skip_batches: number of entries that are skipped.
    """

    def __init__(self, batch_sampler: Iterable[object], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def remainder(self) -> int:
        """See `BatchSamplerShard.remainder`."""
        return last_batch_remainder(self.batch_sampler)

    def __iter__(self) -> Iterator[object]:
        return self.entries(iter(self.batch_sampler))

    def entries(self, inner: Iterator[T]) -> Iterator[T]:
        """Return the entries.

        Args:
            inner: those of the sampler inside, none of which is drawn yet.
        """
        return itertools.islice(inner, self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def cycle_to(items: Sequence[T], length: int) -> list[T]:
    """Return the first `length` entries of `items` repeated without end."""
    return list(itertools.islice(itertools.cycle(items), length))


class BatchSamplerShard(AroundBatchSampler, BatchSampler):
    """The batches of one process out of those of a batch sampler.

    With `even_batches`, every process gets as many batches, all of the same size: the last ones are
    completed with indices from the beginning. A sampler with `drop_last` stops instead at the first
    batch that is too small or not there for every process.

    Args:
        batch_sampler: yields lists of indices.
        num_processes: number of shards.
        process_index: which of them this one is.
        split_batches: whether each batch is cut into a piece per process, or full batches are
            assigned in turn.
        even_batches: whether the last batches are completed. Where it is False, some processes may
            get a smaller last batch, or one batch less. Of a sampler without a `batch_size`, whose
            batches may vary, the first ones complete the last round as they are.

    Attributes:
        num_processes: as given. Set to 1 afterwards, each process reads all batches of its own
            `batch_sampler`: for libraries whose batch sampler knows the ranks.
        batch_sampler: as the caller made it, but for a random sampler that the ranks share.
        source: what is drawn from: `batch_sampler`, or one that gives its batches on every rank.
        remainder: after a complete pass, how many samples of the last round over all processes are
            real; 0 where all are. -1 before the first.
        last_processes: after a complete pass of batches that vary, how many processes had real
            samples in the last round; 0 where all had.

    Raises:
        ConfigError: if the batch size cannot be split; when it is read, if batches vary against it.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.source: Any = batch_sampler
        self.num_processes = self._made_for = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.remainder = -1
        self.last_processes = 0
        self._last_round = 0  # samples, where batches vary
        self._check()

    def _check(self) -> None:
        problems = Problems()
        if not 0 <= self.process_index < self.num_processes:
            problems.add(
                f"process_index={self.process_index} of {self.num_processes} processes",
                "it is a rank below the number of processes",
                "Leave both out to take them from the process state.",
            )
        if self.batch_size is not None and self.split_batches:
            problems += split_problems(self.batch_size, self.num_processes)
        problems.raise_if()

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler as the caller made it."""
        return getattr(self.source, "made_from", self.source)

    @batch_sampler.setter
    def batch_sampler(self, batch_sampler: Any) -> None:
        self.source = batch_sampler

    @property
    def _is_own(self) -> bool:
        """Whether the sampler deals its batches to the ranks itself."""
        return self.num_processes == 1 and (self._made_for > 1 or self.batch_size is None)

    def _check_size(self) -> None:
        if self.batch_size is None and self.split_batches:
            raise ConfigError(unknown_size(class_name(self.batch_sampler)))

    @property
    def total_length(self) -> int:
        """How many batches the sampler inside yields."""
        return len(self.source)

    @property
    def round_size(self) -> int:
        """How many samples all processes together read in a full round, or in the last varying."""
        if self.batch_size is None and self._last_round:
            return self._last_round
        return int(self.batch_size or 1) * (1 if self.split_batches else self.num_processes)

    def __len__(self) -> int:
        if self._is_own:
            return len(self.batch_sampler)
        self._check_size()
        batches = len(self.source)
        if self.split_batches:
            return batches - int(self._last_piece_is_empty(batches))
        if self.drop_last:
            return batches // self.num_processes
        if self.even_batches:
            return -(-batches // self.num_processes)
        return len(range(self.process_index, batches, self.num_processes))

    def _last_piece_is_empty(self, batches: int) -> bool:
        never = self.even_batches or self.drop_last or batches == 0
        if never or not hasattr(self.sampler, "__len__"):
            return False
        last = len(self.sampler) - (batches - 1) * self.batch_size
        return last <= self.process_index * (self.batch_size // self.num_processes)

    def __iter__(self) -> Iterator[list[int]]:
        if self._is_own:
            return self._iterate_own()
        self._check_size()
        if self.even_batches:
            return self._iterate_even() if self.batch_size else self._iterate_varying()
        return self._iterate_split() if self.split_batches else self._iterate_dealt()

    def _rounds(self) -> Iterator[list[list[int]]]:
        per_round = 1 if self.split_batches else self.num_processes
        batches = iter(self.source)
        while group := list(itertools.islice(batches, per_round)):
            yield group

    def _piece(self, samples: Sequence[int]) -> list[int]:
        size = self.round_size // self.num_processes
        return list(samples[self.process_index * size : (self.process_index + 1) * size])

    def _iterate_own(self) -> Iterator[list[int]]:
        own = getattr(self.source, "own_entries", None)
        yield from self.batch_sampler if own is None else own()
        self.remainder = 0

    def _iterate_even(self) -> Iterator[list[int]]:
        size = self.round_size
        first: list[int] = []
        ended = False
        real = 0
        for group in self._rounds():
            samples = group[0] if len(group) == 1 else list(itertools.chain.from_iterable(group))
            if ended or len(samples) > size:
                raise ConfigError.of(
                    f"batch sampler {class_name(self.batch_sampler)}, whose batches vary in size",
                    f"with even_batches=True all but the last have the size {self.batch_size}",
                    "Set even_batches=False.",
                )
            first = first or samples
            if len(samples) == size:
                yield self._piece(samples)
                continue
            ended = True
            if not self.drop_last:
                real = len(samples)
                yield self._piece([*samples, *cycle_to(first, size - real)])
        self.remainder = real  # at the end: a pass inside this one must not disturb it

    def _iterate_varying(self) -> Iterator[list[int]]:
        first: list[list[int]] = []
        real = processes = 0
        for group in self._rounds():
            first += group[: self.num_processes - len(first)]
            missing = self.num_processes - len(group)
            processes = len(group) if missing else 0
            real = sum(map(len, group)) if missing else 0
            completed = [*group, *cycle_to(first, missing)]
            if not (missing and self.drop_last):
                yield completed[self.process_index]
            self._last_round = sum(map(len, completed))
        self.remainder, self.last_processes = real, processes

    def _iterate_split(self) -> Iterator[list[int]]:
        for (batch,) in self._rounds():
            piece = self._piece(batch)
            if piece and not (self.drop_last and len(batch) < self.round_size):
                yield piece
        self.remainder = 0

    def _iterate_dealt(self) -> Iterator[list[int]]:
        for group in self._rounds():
            is_full = len(group) == self.num_processes
            if self.process_index < len(group) and (is_full or not self.drop_last):
                yield group[self.process_index]
        self.remainder = 0


class SamplerShard(Sampler[int]):
    """The entries of one process out of those of a sampler that yields single indices.

    For loaders that do not batch (``batch_size=None``): each entry counts as a batch of one.
    `even_batches`: the last round is completed from the beginning.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        num_processes: int = 1,
        process_index: int = 0,
        even_batches: bool = True,
    ) -> None:
        self.sampler = sampler
        self._shard = BatchSamplerShard(
            BatchSampler(sampler, 1, False), num_processes, process_index, False, even_batches
        )

    @property
    def remainder(self) -> int:
        """See `BatchSamplerShard.remainder`."""
        return self._shard.remainder

    @property
    def round_size(self) -> int:
        """See `BatchSamplerShard.round_size`."""
        return self._shard.round_size

    def __iter__(self) -> Iterator[int]:
        return (entry for (entry,) in self._shard)

    def __len__(self) -> int:
        return len(self._shard)


def last_batch_remainder(sampler: object) -> int:
    """Return how many samples of the last round were real, 0 if all.

    For a sampler that is not sharded, it is the size of its short last batch (0 if that is full).
    """
    known = getattr(sampler, "remainder", None)
    if known is not None:
        return int(known)
    inner, size = getattr(sampler, "sampler", None), getattr(sampler, "batch_size", None)
    if inner is None or not size or getattr(sampler, "drop_last", False):
        return 0
    return len(inner) % size if hasattr(inner, "__len__") else 0


def last_batch_processes(sampler: object) -> tuple[int, int] | None:
    """Return how many processes had real samples in the last round, and how many there are.

    None where single samples, and not whole batches, complete it.
    """
    shards = (inner for inner in samplers(sampler) if isinstance(inner, BatchSamplerShard))
    found = next(shards, None)
    if found is None or not found.last_processes:
        return None
    return found.last_processes, found.num_processes


def samplers(sampler: object) -> Iterator[Any]:
    """Yield `sampler` and those inside it, outermost first."""
    while sampler is not None:
        yield sampler
        name = "source" if isinstance(sampler, BatchSamplerShard) else "batch_sampler"
        inner = getattr(sampler, name, None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def class_name(sampler: object) -> str:
    """Return the class of `sampler`; of what the engine put around the caller's own, of that."""
    kinds = [type(inner) for inner in samplers(sampler)]
    own = [kind for kind in kinds if not kind.__module__.startswith("accel.")]
    return (own or kinds)[0].__name__


def drawing_sampler(sampler: object) -> Any:
    """Return the sampler of indices inside a batch sampler; any other as it is."""
    inner = getattr(sampler, "sampler", None)
    return sampler if inner is None else inner


def set_sampler_epoch(sampler: object, epoch: int) -> None:
    """Hand `epoch` to every sampler inside `sampler` that wants it."""
    for inner in samplers(sampler):
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)


def sampler_epoch(sampler: object) -> int | None:
    """Return the epoch of the outermost sampler inside `sampler` that has one."""
    for inner in samplers(sampler):
        epoch = getattr(inner, "epoch", None)
        if isinstance(epoch, int) and hasattr(inner, "set_epoch"):
            return epoch
    return None


def total_batch_size(sampler: object) -> int:
    """Return how many samples all processes together read in a full round."""
    found = 1
    for inner in samplers(sampler):
        if isinstance(inner, (BatchSamplerShard, SamplerShard)):
            return inner.round_size
        found = max(found, getattr(inner, "batch_size", None) or 1)
    return found


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
