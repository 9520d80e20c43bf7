"""What the prepared loaders have in common, and how a loader is built again with changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.data.samplers import SkipBatchSampler, sampler_epoch, samplers, set_sampler_epoch
from accel.reading import Reading
from accel.rng import preserved, synchronize_rng_states
from accel.state import GradientState, PartialState

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

_SHARED_DATA_AXES = ("tp", "cp", "sp", "pp")


def data_rank(state: PartialState, mesh: Any = None) -> tuple[int, int]:
    """Return how many shares the data has and which is this process's."""
    if mesh is None:
        return state.num_processes, state.process_index
    count, index = 1, 0
    for axis in mesh.mesh_dim_names or ():
        if axis not in _SHARED_DATA_AXES:
            size = mesh[axis].size()
            count, index = count * size, index * size + mesh.get_local_rank(axis)
    return count, index


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that build a loader like `loader`, without data set and samplers."""
    found = {name: getattr(loader, name) for name in _LOADER_ARGUMENTS if hasattr(loader, name)}
    if not found.get("pin_memory_device"):
        found.pop("pin_memory_device", None)
    if isinstance(loader.dataset, IterableDataset):
        found.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return found


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what yields a loader's indices: its batch sampler, or its sampler without one."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def index_arguments(loader: DataLoader[Any], sampler: Any) -> dict[str, Any]:
    """Return the arguments that make `sampler` yield the indices of a loader like `loader`."""
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": sampler}
    return {"batch_sampler": sampler}


@dataclass
class _Passes:
    """How many passes over the data were made; shared by a loader and its skipping copies."""

    count: int = 0


class PreparedLoader(DataLoader[Any]):
    """What the prepared loaders have in common.

    Attributes:
        device: where batches are put; None leaves them where they are.
        rng_types: generators that ranks synchronise at the start of a pass.
        synchronized_generator: the one called "generator".
        skip_batches: how many batches each pass leaves out at its start, after fetching them.
        end_of_dataloader: whether the batch in hand is the last of the pass.
        remainder: on the last batch, how many of its samples over all processes are real, 0 if all;
            -1 if that is not known.
        reading: the pass under way, None where there is none.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None,
        rng_types: Iterable[Any] | None,
        synchronized_generator: torch.Generator | None,
        skip_batches: int,
        non_blocking: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = None if device is None else torch.device(device)
        self.rng_types = None if rng_types is None else list(rng_types)
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.end_of_dataloader = False
        self.remainder = -1
        self.reading: Reading | None = None
        self._last_size = 0
        self._non_blocking = non_blocking
        self._passes = _Passes()
        self._started: list[torch.Tensor] | None = None
        self._goes_on = False  # whether passes begin where an earlier one was cut off
        sampler = getattr(self.batch_sampler, "sampler", None)
        if sampler is not None:
            # torch puts a sequential one here; `loader.sampler` should be the one in use.
            self.__dict__["sampler"] = sampler

    def _own_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that only this class takes."""
        raise NotImplementedError

    def _skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one without its first `num_batches` batches."""
        arguments = {**loader_arguments(self), **self._own_arguments()}
        arguments["skip_batches"] = self.skip_batches
        if isinstance(self.dataset, IterableDataset):
            arguments["skip_batches"] += num_batches
        else:
            entries = num_batches * self._entries_per_batch
            sampler = SkipBatchSampler(index_sampler(self), entries)
            arguments.update(index_arguments(self, sampler))
        loader = type(self)(self.dataset, **arguments)
        loader._passes = self._passes
        loader._goes_on = True
        return loader

    def _get_iterator(self) -> Any:
        if not self._goes_on:
            return super()._get_iterator()
        # torch draws the workers' seed. The pass that is gone on with did so when it began, so that
        # a second draw would make the rest of a resumed epoch differ from one that was not cut.
        with preserved():
            return super()._get_iterator()

    _entries_per_batch = 1

    def __getstate__(self) -> dict[str, Any]:
        # Neither live workers nor process groups travel; what a rank reads was decided before.
        nothing = {"_iterator": None, "torch_device_mesh": None, "reading": None}
        return {**self.__dict__, **nothing}

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one where none is under way."""
        found = sampler_epoch(index_sampler(self))
        return self._passes.count if found is None else found

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to samplers and data set. The end of a pass hands them the next one.

        Args:
            epoch: number of the next pass, from 0 on.
        """
        self._passes.count = epoch
        set_sampler_epoch(index_sampler(self), epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that the loader and its samplers draw from."""
        owners = [self, *samplers(index_sampler(self))]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of `generators`; those at the start of a pass that is under way.

        With these states a new pass has the order of the one under way.
        """
        if self._started is not None:
            return self._started
        return [generator.get_state() for generator in self.generators()]

    @property
    def total_batch_size(self) -> int:
        """The samples of one batch over all processes."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """The samples of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def _enter(self) -> tuple[bool, int, Reading | None]:
        """Start a pass; return what `_leave` restores, of a pass around this one."""
        outer = self.end_of_dataloader, self.remainder, self.reading
        self.end_of_dataloader, self.remainder, self.reading = False, -1, Reading()
        GradientState()._add_dataloader(self)
        return outer

    def _synchronize(self) -> None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self._started = [generator.get_state() for generator in self.generators()]

    def _followed(self, units: Iterator[Any]) -> Iterator[Any]:
        """Return `units`, which are read one ahead; stateful loaders note their state."""
        return units

    def _end(self, remainder: int, size: int | None = None) -> None:
        """Say that the batch given next is the last.

        Args:
            remainder: what `remainder` says.
            size: samples of the batch over all processes, repetitions included; None: a full batch.
        """
        self.remainder = remainder
        self._last_size = self.total_batch_size if size is None else size
        self.end_of_dataloader = True
        GradientState()._follow_dataloader()

    def _complete(self, epoch: int) -> None:
        """Go on to the epoch after `epoch`, unless the caller has chosen one meanwhile."""
        GradientState()._note_end(self)
        self.end_of_dataloader = False
        GradientState()._follow_dataloader()
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def _leave(self, outer: tuple[bool, int, Reading | None]) -> None:
        """End a pass, whole or broken off."""
        self._started = None
        if self.end_of_dataloader:  # the caller keeps the last batch, and left: gather_for_metrics
            GradientState().broken_off = self.remainder, self._last_size
        state = GradientState()
        state._note_end(self)
        self.end_of_dataloader, self.remainder, self.reading = outer
        state._remove_dataloader(self)
