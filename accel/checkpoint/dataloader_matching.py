"""Which loader of a run takes which of the saved states: a run may have prepared more, or fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from accel.data.iterable import IterableDatasetShard
from accel.data.loader_arguments import index_sampler
from accel.data.samplers import samplers

Description = dict[str, object]


def describe(loader: DataLoader[object]) -> Description:
    """Return a description that identifies a loader of a run, for any number of processes."""
    dataset: object = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    kinds = [type(sampler) for sampler in samplers(index_sampler(loader))]
    return {
        "dataset": type(dataset).__qualname__,
        "length": _length(dataset),
        "samplers": [k.__qualname__ for k in kinds if not k.__module__.startswith("accel.")],
    }


def match(
    loaders: Sequence[DataLoader[object]], saved: Sequence[Description] | int
) -> list[int | None]:
    """Return for each loader the index of the saved one whose state it takes; None: it is new.

    As many loaders as were saved take the states in order, unless they changed places. `saved` are
    descriptions; of older checkpoints only their number.
    """
    if isinstance(saved, int):
        return [index if index < saved else None for index in range(len(loaders))]
    found: list[int | None] = [None] * len(loaders)
    described = [describe(loader) for loader in loaders]
    left = list(range(len(saved)))
    for same_place in (True, False):
        for position, description in enumerate(described):
            equal = (i for i in left if saved[i] == description)
            index = next((i for i in equal if not same_place or i == position), None)
            if found[position] is None and index is not None:
                found[position] = index
                left.remove(index)
    if len(loaders) == len(saved):  # the others are the same ones, of changed data
        for position in [p for p, index in enumerate(found) if index is None]:
            index = position if position in left else left[0]
            found[position] = index
            left.remove(index)
    return found


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
