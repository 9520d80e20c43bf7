"""Data sets of a recipe, in an order that is a function of (seed, epoch, step) only."""

from __future__ import annotations

import itertools
import operator
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
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
from torch.utils.data._utils import worker as torch_worker

from accel.comm.rng import mix_seeds, preserved
from accel.data.samplers import SeedableRandomSampler, cycle_to
from accel.machine.device import copies_in_order
from accel.machine.errors import AccelError
from runner.recipe import schema
from runner.recipe.batch_plan import BatchPlan
from runner.recipe.user_frames import one_line

# NumPy's global generator takes seeds of 32 bits.
_NUMPY_SEEDS = 1 << 32
_NUMPY_DRAWS = np.random.MT19937(0)  # what samples draw from in the process that trains


@dataclass
class Data:
    """The data sets of a run, as a data factory returns them.

    Args:
        train: training data (a map-style data set, or an iterable one).
        validation: evaluated during training, to select the best state. Several data sets are given
            by name: `{"clean": …, "noisy": …}` measures `clean/loss` and `noisy/loss`.
        test: evaluated once at the end, with the best weights; likewise.
        collate_fn: joins samples into a batch; None: torch's default.
        sampler: yields the indices of a training epoch in their order: one of torch's samplers, or
            one like them. Its draws depend on (seed, epoch) alone. None: each sample, shuffled.
        lengths: length of each training sample, e.g. in tokens: [N]. `dataloader.group_by_length`
            and `trainer.micro_batch_tokens` need it.
        facts: numbers, texts or lists by name that a recipe uses as ``${facts:num_classes}``.
        artifacts: files or folders by name that the trained model needs, such as a tokenizer; they
            are copied to ``<run_dir>/artifacts`` when the run begins.
        check_model: called with each model before the first step; it raises an error
            if the samples do not fit the model, as where it lacks tokens of theirs.

    Example:
        >>> counts = torch.bincount(labels)
        >>> sampler = WeightedRandomSampler(1 / counts[labels], num_samples=len(labels))
        >>> Data(train=TensorDataset(images, labels), sampler=sampler)
    """

    train: Dataset[object]
    validation: Dataset[object] | Mapping[str, Dataset[object]] | None = None
    test: Dataset[object] | Mapping[str, Dataset[object]] | None = None
    collate_fn: Callable[[list[Any]], object] | None = None
    sampler: Sampler[int] | None = None
    lengths: Sequence[int] | torch.Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    check_model: Callable[[torch.nn.Module], None] = lambda model: None

    def __post_init__(self) -> None:
        self.artifacts = {name: Path(path) for name, path in self.artifacts.items()}
        # Numbers of NumPy and of torch, as counting gives them.
        self.facts = {k: v.item() if hasattr(v, "item") else v for k, v in self.facts.items()}

    @property
    def num_train_samples(self) -> int | None:
        """The samples of a training epoch; None: not known."""
        return num_samples(self.train if self.sampler is None else self.sampler)

    def sets(self, split: str) -> dict[str, Dataset[object]]:
        """Return the data sets of a split by name; the name of a single one is empty."""
        found = getattr(self, split)
        if isinstance(found, Mapping):
            return dict(found)
        return {} if found is None else {"": found}

    def sizes(self) -> dict[str, int | None]:
        """Return the number of samples of each data set, e.g. by "train" and "validation/clean".

        That of "train" is the number of an epoch.
        """
        found = {
            f"{split}/{name}" if name else split: num_samples(dataset)
            for split in schema.SPLITS
            for name, dataset in self.sets(split).items()
        }
        return found | {"train": self.num_train_samples}


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


@contextmanager
def training_draws_preserved() -> Iterator[None]:
    """Context for draws that `seed_draws` seeds; the process that trains has its generators back.

    In a worker process there is nothing to preserve.
    """
    if get_worker_info() is not None:
        yield
        return
    python, of_torch = random.getstate(), torch.get_rng_state()
    # To change the generator of NumPy's functions costs nothing, to write its state 25 µs a batch.
    kept, numpy = get_bit_generator(), np.random.get_state(legacy=False)
    set_bit_generator(_NUMPY_DRAWS)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(of_torch)
        set_bit_generator(kept)
        if numpy["has_gauss"]:  # a normal number that was drawn in advance; the change forgets it
            np.random.set_state(numpy)


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


@contextmanager
def _undivided() -> Iterator[None]:
    """Hide the loader worker in the context: a stream that divides itself by it reads all."""
    found, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = found


class SeededStream(IterableDataset[object]):
    """An iterable data set whose random draws are a function of (seed, epoch, position).

    The order is that of the stream. Each of several loader workers reads all of it and yields every
    n-th batch; the loader takes a batch from each in turn. Where the stream has a method
    `make_sample(record)`, it yields records, and a worker calls that for its own samples alone. The
    next pass drops `skip` samples. With `seed_samples` the generators are seeded for each sample.

    Args:
        dataset: the stream.
        seed: of the draws.
        seed_samples: whether the generators are seeded.
        batch_size: samples that a worker yields in a row.
    """

    shards_by_worker = True  # which the engine asks

    def __init__(
        self, dataset: Any, seed: int, seed_samples: bool = True, batch_size: int = 1
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.seed_samples = seed_samples
        self.batch_size = batch_size
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
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        make_sample = getattr(self.dataset, "make_sample", None)
        with who, _undivided():
            samples = iter(self.dataset)
        for position in itertools.count():
            batch = (position - skip) // self.batch_size
            mine = position >= skip and batch % num_workers == number
            draws = training_draws_preserved() if self.seed_samples else nullcontext()
            with who, draws, _undivided():
                if self.seed_samples:
                    seed_draws(self.seed, epoch, position)
                sample = next(samples, end)
                if mine and make_sample is not None and sample is not end:
                    sample = make_sample(sample)
            if sample is end:
                return
            if mine:
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


class SeededOrder(Sampler[int]):
    """The order of another sampler, whose draws are a function of (seed, epoch).

    With `lengths`, the samples of an optimizer step are of like lengths: chunks of 50 windows are
    sorted, and then the windows are shuffled. The samples of a short last window stay there.

    Args:
        sampler: yields the indices of an epoch.
        seed: of all draws, with the epoch.
        lengths: of each sample: [N]; empty: the order is that of the sampler.
        window: samples of an optimizer step.
    """

    def __init__(
        self, sampler: Any, seed: int, lengths: Sequence[int] = (), window: int = 1
    ) -> None:
        self.sampler, self.seed = sampler, seed
        self.lengths, self.window = lengths, window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        generator = getattr(self.sampler, "generator", None)
        with UserCode(f"the sampler {type(self.sampler).__name__}"), preserved(device=False):
            seed_draws(self.seed, self.epoch, 0)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(mix_seeds(self.seed, self.epoch))
            indices = [operator.index(index) for index in self.sampler]
            return iter(self._grouped(indices) if self.lengths else indices)

    def _grouped(self, indices: list[int]) -> list[int]:
        size, num_windows = self.window, len(indices) // self.window
        chunk, whole, found = 50 * size, num_windows * size, []
        for start in range(0, whole, chunk):
            of_chunk = indices[start : min(start + chunk, whole)]
            found += sorted(of_chunk, key=self.lengths.__getitem__)
        for window in torch.randperm(num_windows).tolist():
            found += found[window * size : (window + 1) * size]
        return found[whole:] + indices[whole:]


Order = SeedableRandomSampler | ReplayedRandomSampler | SeededOrder


def make_order(
    dataset: Sized, seed: int, config: schema.DataLoader, sampler: Sampler[int] | None = None
) -> Order:
    """Return the sampler of the training data: one order per epoch, the same on every process."""
    seed = seed if config.data_seed is None else config.data_seed
    if sampler is not None:
        return SeededOrder(sampler, seed)
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
        self, order: Order, batch_size: int, window: int, num_windows: int, multiple: int = 1
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

    def sizes(self, step: int, plan: BatchPlan) -> list[tuple[int, int]]:
        """Return (samples of each rank, real samples of all) of the micro-batches of a step.

        A number of real samples beyond the micro-batch means that all of it are.
        """
        real = min(self.window, self.num_samples - step * self.window)
        return [(plan.micro_batch, left) for left in range(real, 0, -plan.round_size)]


class TokenSampler(WindowSampler):
    """The batches of an epoch, cut so that none exceeds a number of tokens once it is padded.

    A step has the samples that it has in `WindowSampler`, sorted by length, the longest first. All
    ranks have micro-batches of one size at a time; what completes the last ones repeats samples.

    Args:
        order: yields the indices of an epoch.
        lengths: of each sample, in tokens: [N].
        most_tokens: of a micro-batch: its samples times the longest of them. One sample may exceed
            it.
        plan: sizes of steps, and the most samples of a micro-batch.
    """

    def __init__(
        self, order: Order, lengths: Sequence[int], most_tokens: int, plan: BatchPlan
    ) -> None:
        super().__init__(order, plan.micro_batch, plan.global_batch, plan.steps_per_epoch or 0)
        self.batch_size = None  # type: ignore[assignment]  # the engine deals batches that vary
        self.lengths = lengths
        self.most_tokens = most_tokens
        self.plan = plan
        self._drawn: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for step in range(self.start, -(-self.num_samples // self.window)):
            for size, samples in self._rounds(step):
                completed = cycle_to(samples, size * self.plan.dp_size)
                for first in range(0, len(completed), size):
                    yield [(epoch, index) for index in completed[first : first + size]]

    def sizes(self, step: int, plan: BatchPlan) -> list[tuple[int, int]]:
        """Return (samples of each rank, real samples of all) of the micro-batches of a step."""
        return [(size, len(samples)) for size, samples in self._rounds(step)]

    def _rounds(self, step: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (samples of each rank, indices of all ranks) of each round of micro-batches."""
        if self._drawn[0] != self.epoch:
            self._drawn = self.epoch, list(self.sampler)[: self.num_samples]
        window = self._drawn[1][step * self.window : (step + 1) * self.window]
        left = sorted(window, key=self.lengths.__getitem__, reverse=True)
        while left:
            fitting = max(1, self.most_tokens // max(1, self.lengths[left[0]]))
            size = min(fitting, self.plan.micro_batch, -(-len(left) // self.plan.dp_size))
            yield size, left[: size * self.plan.dp_size]
            left = left[size * self.plan.dp_size :]


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
    pinned = copies_in_order(torch.device(device_type))
    if config.pin_memory is not None:
        pinned = config.pin_memory
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
