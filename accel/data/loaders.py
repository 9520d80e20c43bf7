"""The prepared loaders: torch loaders that read the shard of this process."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.comm.ops import send_to_device
from accel.data.batch_layout import SampleLayout, cut_samples, num_samples
from accel.data.pass_tracking import PreparedLoader
from accel.data.samplers import (
    BatchSamplerShard,
    CompletedBatchSampler,
    SamplerShard,
    SliceFunction,
    added_indices,
    index_sampler,
    last_batch_remainder,
    samplers,
    total_batch_size,
)
from accel.data.stream import IterableDatasetShard, handed_over, joined
from accel.machine.enums import RNGType
from accel.machine.imports import require
from accel.machine.tree import iterate
from accel.plan.dims import data_rank_of
from accel.state import GradientState, PartialState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.data.dispatch import Round

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "PreparedLoader", "SkipDataLoader"]

_END = object()


def data_rank(state: PartialState, mesh: DeviceMesh | None = None) -> tuple[int, int]:
    """Return the (data-parallel rank, size) of this process, on a mesh where one is given."""
    return (state.process_index, state.num_processes) if mesh is None else data_rank_of(mesh)


class _MaybeStateful(DataLoader[Any]):
    """A loader class whose instances are stateful ones where `use_stateful_dataloader` says so."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        stateful = given.get("use_stateful_dataloader", False)
        return super().__new__(stateful_class(cls) if stateful else cls)


class DataLoaderShard(_MaybeStateful, PreparedLoader):
    """A loader that yields this process's batches on its device.

    It fetches one batch ahead, so that `end_of_dataloader` is known while the last one is in hand.

    Args:
        dataset: the data set.
        device: where batches are put; None leaves them where they are.
        rng_types: generators that ranks synchronise at the start of each pass: "torch", "cuda",
            "xla", "generator".
        synchronized_generator: the one called "generator".
        skip_batches: number of batches that each pass fetches and skips at its start.
        use_stateful_dataloader: whether it is a `torchdata.stateful_dataloader.StatefulDataLoader`.
        _drop_last: whether a short last round is dropped: then all samples of the last are real.
        _non_blocking: whether copies to the device overlap with computation.
        torch_device_mesh: kept as an attribute; the sampler decides what this process reads.
        iteration: epoch of the first pass.
        kwargs: of `torch.utils.data.DataLoader`.

    Raises:
        MissingPackageError: if a stateful loader is requested and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        device: torch.device | None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            non_blocking=_non_blocking,
            **kwargs,
        )
        self._drop_last = _drop_last
        self.torch_device_mesh = torch_device_mesh
        if iteration:
            self.set_epoch(iteration)

    def _pass(self) -> Iterator[object]:
        current_pass = self._enter()
        try:
            self._synchronize()
            position = self._position()
            skipped = position.get("behind", 0) if position else self.skip_batches
            batches = self._followed(self._batches(skipped))
            for _ in itertools.islice(batches, skipped):
                pass
            current = next(batches, _END)
            place = None if current is _END else self._placement(current)
            while current is not _END:
                following = next(batches, _END)
                if following is _END:
                    remainder = self._last_remainder(current)
                    self._end(current_pass, remainder, None if self._completes else remainder)
                current = current if place is None else place(current)
                current_pass.given += 1
                yield current
                current = following
            self._complete(current_pass)
        finally:
            self._leave(current_pass)

    def _get_iterator(self) -> Any:
        if not self._joins_rests:
            return super()._get_iterator()
        with handed_over(self):
            return super()._get_iterator()

    def _whole(self, batches: Iterator[object]) -> Iterator[object]:
        if not self._joins_rests:
            return batches
        self._rests = []
        return joined(self, batches, self._rests, self.epoch)

    @property
    def _joins_rests(self) -> bool:
        return self.num_workers > 0 and isinstance(self.dataset, IterableDatasetShard)

    def __len__(self) -> int:
        length = super().__len__()
        if self._joins_rests:  # which torch counts as batches, and would warn of
            self._IterableDataset_len_called = None
        return length

    def _placement(self, batch: object) -> Callable[[object], object] | None:
        """Return what puts a batch on the device, None where batches like `batch` are there."""
        if self.device is None:
            return None
        if self.device.type == "cpu" and all(t.device.type == "cpu" for t in iterate(batch)):
            return None
        return partial(send_to_device, device=self.device, non_blocking=self._non_blocking)

    @property
    def _completes(self) -> bool:
        """Whether a short last round may be completed; all samples of any other are real."""
        if isinstance(self.dataset, IterableDataset):
            return isinstance(self.dataset, IterableDatasetShard)
        shards = (BatchSamplerShard, SamplerShard)
        return any(isinstance(inner, shards) for inner in samplers(index_sampler(self)))

    def _last_remainder(self, batch: object) -> int:
        """Return how many samples the last round has, whose batch is `batch`; 0 if it is full."""
        if self._drop_last:
            return 0
        if not isinstance(self.dataset, IterableDataset):
            return last_batch_remainder(index_sampler(self))
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.remainder
        return num_samples(batch, self.batch_size) % self.batch_size if self.batch_size else 0

    @property
    def total_batch_size(self) -> int:
        """The samples of one batch over all processes."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.round_size
        return total_batch_size(index_sampler(self))

    @property
    def total_dataset_length(self) -> int:
        """The samples of the data set; those of a stream before it is sharded."""
        if isinstance(self.dataset, IterableDatasetShard):
            return len(self.dataset.dataset)
        return super().total_dataset_length


class DataLoaderDispatcher(_MaybeStateful, PreparedLoader):
    """A loader that reads on the main process, which gives each process its slice of every batch.

    Args:
        dataset: the data set; only the main process reads it.
        split_batches: whether each batch is cut into a slice per process; else as many batches as
            there are processes are read and joined.
        skip_batches: number of rounds that each pass reads and skips at its start.
        use_stateful_dataloader: whether it is a `torchdata.stateful_dataloader.StatefulDataLoader`.
        _drop_last: whether a last round that is too small is dropped; else it is completed with
            samples from the beginning, so that each process gets as many.
        _non_blocking: whether copies to the device overlap with computation.
        slice_fn: cuts a batch, as ``slice_fn(batch, slice, process_index=…, num_processes=…)``;
            None: tensors, arrays and lists with one entry per sample are cut, the rest is not.
        torch_device_mesh: ranks along its axes "tp", "cp", "sp" and "pp" get the same slice.
        iteration: epoch of the first pass.
        device: where slices are put; None leaves them on the CPU.
        rng_types: generators that ranks synchronise at the start of each pass.
        synchronized_generator: the one called "generator".
        even_batches: whether a last round that cannot be cut evenly is completed.
        num_processes: how many slices; None: as the mesh says, else one per process.
        process_index: which slice; None: as the mesh says, else the rank.
        kwargs: of `torch.utils.data.DataLoader`.

    Raises:
        MissingPackageError: if a stateful loader is requested and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        *,
        device: torch.device | None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        even_batches: bool = True,
        num_processes: int | None = None,
        process_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            non_blocking=_non_blocking,
            **kwargs,
        )
        index, count = data_rank(PartialState(), torch_device_mesh)
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.even_batches = even_batches
        self.num_processes = count if num_processes is None else num_processes
        self.process_index = index if process_index is None else process_index
        self._drop_last = _drop_last
        self.torch_device_mesh = torch_device_mesh
        if iteration:
            self.set_epoch(iteration)

    @property
    def even_batches(self) -> bool:
        """Whether a last round that cannot be cut evenly is completed."""
        return self._even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._even_batches = even_batches
        for sampler in samplers(index_sampler(self)):
            if isinstance(sampler, CompletedBatchSampler):
                sampler.even_batches = even_batches

    @property
    def _entries_per_batch(self) -> int:  # type: ignore[override]
        return 1 if self.split_batches else self.num_processes

    @property
    def _reader_batch_size(self) -> int | None:
        return self.batch_size or getattr(self.batch_sampler, "batch_size", None)

    @property
    def total_batch_size(self) -> int:
        """The samples of one batch over all processes."""
        return (self._reader_batch_size or 1) * self._entries_per_batch

    def __len__(self) -> int:
        batches = DataLoader.__len__(self)
        rounds = -(-batches // self._entries_per_batch)
        if self._drop_last:
            rounds = batches // self._entries_per_batch
        elif not self.even_batches and batches and self._last_slice_is_empty(batches):
            rounds -= 1
        return max(0, rounds - self.skip_batches)

    def _last_slice_is_empty(self, batches: int) -> bool:
        samples = self._samples_read()
        if self._reader_batch_size is None or samples is None:
            return False
        real = samples - (batches - 1) // self._entries_per_batch * self.total_batch_size
        return self._slice(real).start >= real

    def _samples_read(self) -> int | None:
        """Return how many samples a pass reads, None if that is not known."""
        is_stream = isinstance(self.dataset, IterableDataset)
        read: Any = self.dataset if is_stream else getattr(self.batch_sampler, "sampler", None)
        return len(read) if hasattr(read, "__len__") else None

    def _slice(self, size: int) -> slice:
        length = -(-size // self.num_processes)
        return slice(self.process_index * length, (self.process_index + 1) * length)

    def _pass(self) -> Iterator[object]:
        state, windows = PartialState(), GradientState()
        current_pass = self._enter()
        try:
            self._synchronize()
            rounds = self._rounds() if state.is_main_process else iter(())
            while (found := self._exchange(state, rounds)) is not None:
                mine = self._slice(found.size)
                following = found.following
                current_pass.note(found.real, found.size, windows._num_passes)
                if following is None or self._slice(following).start >= following:
                    remainder = found.real if found.real < self._round_size(found) else 0
                    self._end(current_pass, remainder, found.size)
                if mine.start < found.size:
                    batch = self._cut(found, mine)
                    yield batch
            self._complete(current_pass)
        finally:
            self._leave(current_pass)

    def _round_size(self, found: Round) -> int:
        """Return from how many samples on a round counts as full, 0 if none is ever completed."""
        if not self.even_batches:
            return 0
        return self.total_batch_size if self._reader_batch_size else found.size

    def _exchange(self, state: PartialState, rounds: Iterator[Round]) -> Round | None:
        if state.num_processes == 1:
            return next(rounds, None)
        from accel.data.dispatch import receive_round, send_round

        if state.is_main_process:
            return send_round(state.comm, rounds, state.device)
        return receive_round(state.comm, state.device)

    def _cut(self, found: Round, mine: slice) -> object:
        batch, count = found.batch, self.num_processes
        if count > 1 and self.slice_fn is None:
            batch = cut_samples(batch, found.paths, mine)
        elif count > 1 and self.slice_fn is not None:
            batch = self.slice_fn(
                batch, mine, process_index=self.process_index, num_processes=count
            )
        device = torch.device("cpu") if self.device is None else self.device
        return send_to_device(batch, device, non_blocking=self._non_blocking)

    def _rounds(self) -> Iterator[Round]:
        from accel.data.dispatch import Round, RoundReader

        name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__qualname__)
        reader = self._reader = RoundReader(
            SampleLayout(self._reader_batch_size, f"collate_fn ({name})"),
            per_round=self._entries_per_batch,
            full_size=self.total_batch_size if self._reader_batch_size else None,
            num_processes=self.num_processes,
            even_batches=self.even_batches,
            drop_last=self._drop_last,
        )
        position = self._position()
        if position.get("position") and "rounds" in position:  # without: the start of a pass
            reader.load_state_dict(position["rounds"])
        skipped = self._behind = position.get("behind", 0) if position else self.skip_batches
        batches = reader.read(self._batches(skipped), skipped)
        read: Iterator[Any] = itertools.chain(self._followed(batches), (None,))
        for (batch, size, real), following in itertools.pairwise(read):
            if following is None:
                real -= added_indices(index_sampler(self))
            yield Round(batch, size, real, following and following[1], reader.layout.paths)


class SkipDataLoader(_MaybeStateful):
    """A loader that skips its first batches, for data that can only be read in order.

    Args:
        dataset: the data set.
        skip_batches: number of batches that each pass fetches and skips at its start.
        use_stateful_dataloader: whether it is a `torchdata.stateful_dataloader.StatefulDataLoader`.
        kwargs: of `torch.utils.data.DataLoader`.

    Raises:
        MissingPackageError: if a stateful loader is requested and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches

    @property
    def base_dataloader(self) -> Self:
        """The torch loader that reads the batches: this one, which is of torch's class."""
        return self

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A `StatefulDataLoader` may resume behind batches that are skipped.
        resumed = getattr(self, "next_iter_state", None) is not None
        batches: Any = super().__iter__()
        done = batches._num_yielded if resumed else 0
        return itertools.islice(batches, max(0, self.skip_batches - done), None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


_KINDS: dict[str, type[DataLoader[object]]] = {
    "StatefulDataLoaderShard": DataLoaderShard,
    "StatefulDataLoaderDispatcher": DataLoaderDispatcher,
    "StatefulSkipDataLoader": SkipDataLoader,
}


def stateful_class(kind: type[DataLoader[object]]) -> type[DataLoader[object]]:
    """Return the variant of a loader class of this module that is a `StatefulDataLoader`.

    Raise `MissingPackageError` if torchdata is not installed.
    """
    require("torchdata", "use_stateful_dataloader=True", extra="stateful")
    names = [name for name, known in _KINDS.items() if known is kind]
    return _variant(names[0]) if names else kind


@functools.cache
def _variant(name: str) -> type[DataLoader[object]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from accel.data.stateful import Tracked, TrackedOnMain

    kind = _KINDS[name]
    bases = {DataLoaderShard: Tracked, DataLoaderDispatcher: TrackedOnMain}
    base: type = bases.get(kind, StatefulDataLoader)
    members = {"__module__": __name__, "use_stateful_dataloader": True}
    return type(name, (kind, base), members)


def __getattr__(name: str) -> type[DataLoader[object]]:
    """Return a stateful variant by its name, by which pickle finds it."""
    if name in _KINDS:
        return _variant(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
