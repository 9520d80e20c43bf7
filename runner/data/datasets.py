"""Data sets of a recipe, in an order that is a function of (seed, epoch, step) only."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from accel.comm.rng import mix_seeds, preserved
from accel.data.samplers import SeedableRandomSampler, cycle_to
from accel.machine.errors import AccelError
from runner.recipe import schema
from runner.recipe.user_frames import one_line

# NumPy's global generator takes seeds of 32 bits.
_NUMPY_SEEDS = 1 << 32


@dataclass
class Data:
    """The data sets of a run, as a data factory returns them.

    Args:
        train: training data (a map-style data set, or an iterable one).
        validation: evaluated during training, to select the best state. Several data sets are given
            by name: `{"clean": …, "noisy": …}` measures `clean/loss` and `noisy/loss`.
        test: evaluated once at the end, with the best weights; likewise.
        collate_fn: joins samples into a batch; None: torch's default.
    """

    train: Dataset[object]
    validation: Dataset[object] | Mapping[str, Dataset[object]] | None = None
    test: Dataset[object] | Mapping[str, Dataset[object]] | None = None
    collate_fn: Callable[[list[Any]], object] | None = None

    def sets(self, split: str) -> dict[str, Dataset[object]]:
        """Return the data sets of a split by name; the name of a single one is empty."""
        found = getattr(self, split)
        if isinstance(found, Mapping):
            return dict(found)
        return {} if found is None else {"": found}

    def sizes(self) -> dict[str, int | None]:
        """Return the number of samples of each data set, e.g. by "train" and "validation/clean"."""
        return {
            f"{split}/{name}" if name else split: num_samples(dataset)
            for split in schema.SPLITS
            for name, dataset in self.sets(split).items()
        }


def num_samples(dataset: object) -> int | None:
    """Return the length of a data set; None for a stream."""
    return len(dataset) if isinstance(dataset, Sized) else None


# -- random draws in a data set -------------------------------------------------------------------


def seed_draws(seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch (on the CPU) for one sample."""
    mixed = mix_seeds(seed, epoch, index)
    random.seed(mixed)
    np.random.seed(mixed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(mixed)


def training_draws_preserved() -> AbstractContextManager[None]:
    """Context that leaves the generators as they were in the process that trains.

    In a worker process there is nothing to preserve.
    """
    return nullcontext() if get_worker_info() is not None else preserved(device=False)


def draws_nothing(dataset: object) -> bool:
    """Return whether reading a data set is known to draw nothing at random."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


class SeededDataset(Dataset[object]):
    """A map-style data set whose random draws are a function of (seed, epoch, index).

    It is indexed by (epoch, index), so that persistent workers learn the epoch, or by an index of
    epoch 0. If `dataset` has `set_epoch`, that is called before each new epoch is read. With
    `seed_samples` the generators are seeded for each sample.
    """

    def __init__(self, dataset: Any, seed: int, seed_samples: bool = True) -> None:
        self.dataset = dataset
        self.seed = seed
        self.seed_samples = seed_samples and not draws_nothing(dataset)
        self._epoch_set: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int | tuple[int, int]) -> object:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> list[object]:
        """Return the samples of a batch."""
        with UserCode(f"the data set {type(self.dataset).__name__}"):
            return self._read_all(keys)

    def _read_all(self, keys: Sequence[int | tuple[int, int]]) -> list[object]:
        pairs = [key if isinstance(key, tuple) else (0, key) for key in keys]
        if self.seed_samples:
            with training_draws_preserved():
                return [self._read(epoch, index) for epoch, index in pairs]
        for epoch in {epoch for epoch, _ in pairs}:
            self._set_epoch(epoch)
        indices = [index for _, index in pairs]
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def _read(self, epoch: int, index: int) -> object:
        self._set_epoch(epoch)
        seed_draws(self.seed, epoch, index)
        return self.dataset[index]

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch_set:
            self._epoch_set = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)


class SeededStream(IterableDataset[object]):
    """An iterable data set whose random draws are a function of (seed, epoch, position).

    The stream is read in one process, in its own order; the next pass reads and drops `skip`
    samples. With `seed_samples` the generators are seeded for each sample.
    """

    def __init__(self, dataset: Any, seed: int, seed_samples: bool = True) -> None:
        self.dataset = dataset
        self.seed = seed
        self.seed_samples = seed_samples
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[object]:
        epoch, skip, end = self.epoch, self.skip, object()
        who = UserCode(f"the stream {type(self.dataset).__name__}")
        with who:
            samples = iter(self.dataset)
        for position in itertools.count():
            with who, training_draws_preserved() if self.seed_samples else nullcontext():
                if self.seed_samples:
                    seed_draws(self.seed, epoch, position)
                sample = next(samples, end)
            if sample is end:
                return
            if position >= skip:
                yield sample


# -- order ---------------------------------------------------------------------------------------


class ReplayedRandomSampler(RandomSampler):
    """Torch's random sampler, whose order in epoch e is its (e + 1)-th draw from one generator."""

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source, generator=torch.Generator())
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed)
        for _ in range(self.epoch):
            deque(super().__iter__(), maxlen=0)
        return super().__iter__()


def make_order(
    dataset: Sized, seed: int, config: schema.DataLoader
) -> SeedableRandomSampler | ReplayedRandomSampler:
    """Return the sampler of the training data: one order per epoch, the same on every process."""
    seed = seed if config.data_seed is None else config.data_seed
    if config.use_seedable_sampler:
        return SeedableRandomSampler(dataset, data_seed=seed, is_mixed=True)  # a sweep over seeds
    return ReplayedRandomSampler(dataset, seed)


class WindowSampler(Sampler[list[tuple[int, int]]]):
    """The batches of an epoch, cut from one order whatever the number of processes.

    Yields lists of (epoch, index). Dealt out or split by the engine, the samples of step k are
    those at the positions [k · window, (k + 1) · window) of the order.

    Args:
        order: yields the indices of an epoch.
        batch_size: samples of a list.
        window: samples of an optimizer step.
        num_windows: how many steps the epoch has.
        multiple: the number of samples of the epoch is completed to a multiple of it, with indices
            from the beginning.

    Attributes:
        epoch: the epoch of the next pass.
        start: how many steps the next pass skips; nothing is read for them.
    """

    drop_last = False
    same_on_every_rank = True  # the engine does not check it

    def __init__(
        self,
        order: SeedableRandomSampler | ReplayedRandomSampler,
        batch_size: int,
        window: int,
        num_windows: int,
        multiple: int = 1,
    ) -> None:
        self.sampler = order
        self.batch_size = batch_size
        self.window = window
        self.num_samples = min(len(order), num_windows * window)
        self.multiple = multiple
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch
        self.sampler.set_epoch(epoch)

    def _bounds(self) -> tuple[int, int]:
        completed = self.num_samples + -self.num_samples % self.multiple
        return min(self.start * self.window, completed), completed

    def __len__(self) -> int:
        first, end = self._bounds()
        return -(-(end - first) // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, size = self.epoch, self.batch_size
        first, end = self._bounds()
        order = list(self.sampler)
        indices = order[: self.num_samples]
        indices += cycle_to(order, end - self.num_samples)
        for start in range(first, end, size):
            yield [(epoch, index) for index in indices[start : min(start + size, end)]]


# -- loaders -------------------------------------------------------------------------------------


def make_loader(
    dataset: Dataset[object],
    config: schema.DataLoader,
    device_type: str,
    collate_fn: Callable[[list[Any]], object] | None = None,
    **kwargs: Any,
) -> DataLoader[object]:
    """Return torch's loader as the `dataloader` node describes it.

    It has a generator of its own, so that making an iterator never draws from the one that training
    draws from. Batches are page-locked for accelerators unless the node says. `kwargs` are the
    batch size and samplers.
    """
    pinned = device_type not in ("cpu", "mps") if config.pin_memory is None else config.pin_memory
    return DataLoader(
        dataset,
        num_workers=config.num_workers,
        pin_memory=pinned,
        prefetch_factor=config.prefetch_factor,
        persistent_workers=config.persistent_workers,
        collate_fn=Collate(collate_fn),
        generator=torch.Generator(),
        **kwargs,
    )


class DataError(AccelError, RuntimeError):
    """The user's data raised an error that a loader loses, or cannot be collated."""


class UserCode:
    """Context in which the user's code `source` reads data: its errors reach the training loop."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        in_worker = get_worker_info() is not None
        if isinstance(error, StopIteration) or (in_worker and not _is_picklable(error)):
            raise DataError(f"{self._source} raised {one_line(error)}") from error


def _is_picklable(error: BaseException) -> bool:
    try:
        pickle.dumps(type(error))
        str(error)
    except Exception:
        return False
    return isinstance(error, Exception)


class Collate:
    """Joins samples by the user's `collate_fn`, or by torch's default where it is None."""

    def __init__(self, function: Callable[[list[Any]], object] | None) -> None:
        self.function = function

    def __call__(self, samples: list[object]) -> object:
        """Return the batch of `samples`.

        Raises:
            DataError: if they differ in shape, keys or length, or are no numbers.
        """
        if self.function is not None:
            with UserCode("collate_fn"):
                return self.function(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(
                f"samples cannot be collated ({one_line(error)}): they must agree in type, "
                "shape and keys. Pad them in the data set, or give Data(collate_fn=…)."
            ) from error
