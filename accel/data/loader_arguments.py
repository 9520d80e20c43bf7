"""The arguments that build a loader like another one, with other samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

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
