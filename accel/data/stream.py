"""Iterable data sets: the shard of each process, and the parts that loader workers read.

Every process reads the full stream and keeps the samples of its own batches. Where several loader
workers divide the stream, none knows when the others end. So a worker that runs out of full rounds
hands over the samples of all ranks that are left. The loader cuts rounds from those of all workers
at the end of the pass, and only the last of these rounds is padded. Every rank has the same samples
left, so all ranks make as many steps.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from accel.comm import rng
from accel.data.batch_layout import is_storable, warn_of_lost_samples
from accel.data.samplers import cycle_to, split_problems
from accel.machine.errors import ConfigError, Problem

_SHARD_COUNTS = ("num_shards", "n_shards")  # attributes of Hugging Face data sets


class Rest:
    """Samples that a loader worker has left at the end of its part of a stream.

    Attributes:
        worker: its number.
        real: how many samples its last round has, of those of all ranks.
        samples: these, then repetitions that pad a round. Empty where the worker gave the round.
        packed: `samples`, pickled on the way to the loader.
    """

    def __init__(self, worker: int, real: int, samples: list[object]) -> None:
        self.worker, self.real, self.samples = worker, real, samples
        self.packed = b""


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of those of an iterable data set.

    Every process reads the full stream and keeps its own samples, full batches of them. The last
    round is padded with samples from the beginning, or dropped with `drop_last`; without
    `even_batches` each process gets what there is for it, some a short batch or none. Where several
    loader workers divide the stream, prepared loaders join what these have left at their ends; a
    plain loader pads the last round of each.

    Args:
        dataset: the stream, the same on every process.
        batch_size: samples per batch of one process; with `split_batches`, of all together.
        drop_last: whether a last round that is too small is dropped.
        num_processes: number of shards of the stream.
        process_index: which of them this one is.
        split_batches: whether `batch_size` counts the samples of all processes.
        even_batches: whether the last round is padded.

    Attributes:
        remainder: after a complete pass in this process, or by workers of a prepared loader, how
            many samples of the last round over all processes are real; 0 where all are. -1 before.
        hands_over: whether a loader worker gives a `Rest` for what it has left, as a batch.

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
        self._first: list[object] = []  # samples of the first round, which pad the last one

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

    @property
    def _pads(self) -> bool:
        return self.even_batches and not self.drop_last

    def _mine(self) -> slice:
        size = self.round_size // self.num_processes
        return slice(self.process_index * size, (self.process_index + 1) * size)

    def __iter__(self) -> Iterator[Any]:
        size, mine = self.round_size, self._mine()
        worker = get_worker_info() if self.hands_over else None
        first, self._first = self._first, []
        stream = iter(self.dataset)
        rest: Rest | None = None
        real = 0
        while samples := list(itertools.islice(stream, size)):
            first = self._first = first or samples
            if len(samples) < size:
                found = len(samples)
                repeated = cycle_to(first, size - found) if self._pads else []
                if worker is not None and worker.num_workers > 1:
                    rest = Rest(worker.id, found, samples + repeated)
                    break
                if self.drop_last:
                    break
                if self._pads:
                    real = found
                    samples += repeated
            yield from samples[mine]
        if worker is not None and real:
            rest = Rest(worker.id, real, [])
        if rest is not None:  # in each place of a batch
            yield from itertools.repeat(rest, size // self.num_processes)
        self._first = []
        self.remainder = real  # at the end: a pass inside this one must not disturb it

    def cut(self, samples: list[object], repeated: list[object]) -> Iterator[list[object]]:
        """Yield the batches of this process out of rounds of the last samples of a pass.

        Args:
            samples: of all processes.
            repeated: pads the last round, where it is padded: at least as many.
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
        """Hand the epoch to the data set, if it takes one.

        Args:
            epoch: number of the next pass, from 0 on.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class StatefulShard(IterableDatasetShard):
    """The shard of a data set that knows its position, and so continues without reading again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data set, and the samples that pad the last round."""
        first = list(self._first) if self._pads else []
        kept = first if is_storable(first) else None
        return {"dataset": self.dataset.state_dict(), "first": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from where `state` was taken."""
        self.dataset.load_state_dict(state["dataset"])
        if state["first"] is None and self._pads:
            warn_of_lost_samples()
        self._first = list(state["first"] or ())


def shard_class(dataset: object) -> type[IterableDatasetShard]:
    """Return the class of the shards of a data set: stateful where the data set is."""
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return StatefulShard if has_state else IterableDatasetShard


# -- data sets with shards of their own ----------------------------------------------------------


def own_shard(dataset: Any, num_processes: int, process_index: int) -> Any | None:
    """Return the part of a Hugging Face stream that a process reads; None for other data sets.

    Its shards (files) are divided, so that each process reads its own files alone. None also if it
    has fewer shards than there are processes.

    Raises:
        ConfigError: for a data set that `split_dataset_by_node` has cut already.
    """
    check_split(dataset)
    shards = next((getattr(dataset, name) for name in _SHARD_COUNTS if hasattr(dataset, name)), 0)
    if not callable(getattr(dataset, "shard", None)) or shards < num_processes:
        return None
    return dataset.shard(num_shards=num_processes, index=process_index)


def uneven_shards(dataset: object) -> Problem:
    """Return the warning that processes which read their own shards may make unequal passes."""
    return Problem(
        f"{type(dataset).__name__} with even_batches=True and dispatch_batches=False",
        "each process reads its own shards, so that one with fewer samples makes fewer steps",
        "Make equal shards and set drop_last=True, end the loop after a number of steps, or set "
        "even_batches=False (join_uneven_inputs) or dispatch_batches=True.",
    )


def check_split(dataset: object) -> None:
    """Raise `ConfigError` for a data set of Hugging Face that `split_dataset_by_node` has cut."""
    cut: Any = getattr(dataset, "_distributed", None)
    size = getattr(cut, "world_size", None)
    if isinstance(size, int) and size > 1:
        raise ConfigError.of(
            f"an iterable data set that is split by node already (rank {cut.rank} of {size})",
            "`prepare` shards the stream, and would shard it again",
            "Leave `split_dataset_by_node` out, or leave the loader out of `prepare`.",
        )


# -- loader workers ------------------------------------------------------------------------------


def worker_problems(
    dataset: object, num_workers: int, worker_init_fn: object = None
) -> list[Problem]:
    """Return why `num_workers` processes cannot read an iterable data set.

    Each worker iterates over a copy of its own, so a data set that does not divide its samples by
    `torch.utils.data.get_worker_info` gives each of them `num_workers` times. One that declares
    nothing is warned of. A `worker_init_fn` may divide them, too.
    """
    if num_workers < 2 or worker_init_fn is not None:
        return []
    declared = shards_by_worker(dataset)
    value = f"num_workers={num_workers} with the iterable data set {type(dataset).__name__}"
    if declared is None:
        rule = (
            "it does not declare `shards_by_worker`: unless its `__iter__` divides the samples by "
            f"`torch.utils.data.get_worker_info()`, each of them comes {num_workers} times"
        )
        remedy = "Set `shards_by_worker = True` on it if it divides them, else num_workers=1."
        warnings.warn(str(Problem(value, rule, remedy)), stacklevel=4)
    if declared is not False:
        return []
    rule = f"it declares `shards_by_worker = False`, so each sample would come {num_workers} times"
    remedy = "Set num_workers=1, or divide the samples by `torch.utils.data.get_worker_info()`."
    return [Problem(value, rule, remedy)]


def shards_by_worker(dataset: object) -> bool | None:
    """Return whether an iterable data set declares that it divides its samples by loader worker.

    An attribute `shards_by_worker` declares it. Torch shards data pipes, and data sets that count
    their shards (`num_shards` of Hugging Face) divide them. None: nothing is declared.
    """
    declared = getattr(dataset, "shards_by_worker", None)
    if declared is not None:
        return bool(declared)
    counts = any(hasattr(dataset, name) for name in _SHARD_COUNTS)
    return True if counts or isinstance(dataset, IterDataPipe) else None


@contextlib.contextmanager
def handed_over(loader: DataLoader[object]) -> Iterator[None]:
    """Have the workers that `loader` starts in the context hand over what they have left.

    Args:
        loader: over an `IterableDatasetShard`; it reads by `joined`.
    """
    shard: IterableDatasetShard = loader.dataset  # type: ignore[assignment]
    users = loader.collate_fn
    loader.collate_fn, shard.hands_over = _Collate(users), True
    try:
        yield
    finally:
        loader.collate_fn, shard.hands_over = users, False


def joined(
    loader: DataLoader[object], batches: Iterator[object], found: list[Rest], epoch: int
) -> Iterator[object]:
    """Yield the batches of a pass, then those of what its workers have left.

    The shard's `remainder` is known afterwards.

    Args:
        loader: over an `IterableDatasetShard`.
        batches: torch's iterator, whose workers were started in `handed_over`.
        found: takes up what workers handed over, when it is read.
        epoch: number of the pass.
    """
    shard: IterableDatasetShard = loader.dataset  # type: ignore[assignment]
    for batch in batches:
        if isinstance(batch, Rest):
            found.append(batch)
        else:
            yield batch
    real: list[object] = []
    repeated: list[object] = []
    for rest in sorted(found, key=lambda rest: rest.worker):
        if rest.packed:
            samples, rest.packed = pickle.loads(rest.packed), b""
            real += samples[: rest.real]
            repeated += samples[rest.real :]
    for number, samples in enumerate(shard.cut(real, repeated)):
        seed = rng.mix_seeds(cast(Any, batches)._base_seed, epoch, number)
        yield _collated(loader, samples, seed, batches)
    shard.remainder = 0
    if shard._pads:
        shard.remainder = sum(rest.real for rest in found) % shard.round_size


def _collated(
    loader: DataLoader[object], samples: list[object], seed: int, iterator: Any
) -> object:
    """Return the batch of `samples`, made as by a further worker with random draws of its own."""
    with rng.preserved(device=False):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)
        collate: Callable[..., object] = loader.collate_fn
        batch = collate(samples if loader.batch_size is not None else samples[0])
    return pin_memory(batch, iterator._pin_memory_device) if iterator._pin_memory else batch


class _Collate:
    """The caller's `collate_fn`; a `Rest` passes it, pickled."""

    def __init__(self, users: Callable[..., object]) -> None:
        self.users = users

    def __call__(self, samples: object) -> object:
        first = samples[0] if type(samples) is list and samples else samples
        if not isinstance(first, Rest):
            return self.users(samples)
        if first.samples:
            first.packed, first.samples = _packed(first.samples), []
        return first


def _packed(samples: list[object]) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
    try:
        pickler.dump(samples)
    except Exception as error:  # whatever a sample raises
        raise ConfigError.of(
            f"samples of a worker that cannot be pickled ({type(error).__name__}: {error})",
            "the samples that several workers have left at their ends are joined in one process",
            "Let the data set yield tensors, arrays, numbers and text, or set num_workers=1.",
        ) from error
    return file.getvalue()


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how to pickle a tensor: of one that is part of a larger one, only this part."""
    plain = tensor.layout is torch.strided and not tensor.requires_grad
    if plain and tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced
