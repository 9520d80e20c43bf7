"""States of data loaders: which loader takes which saved state, and positions within a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from accel.comm.base import Communicator
from accel.data.samplers import index_sampler, samplers
from accel.data.stream import IterableDatasetShard
from accel.machine.errors import CheckpointError, Problem

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


def match(loaders: Sequence[DataLoader[object]], saved: Sequence[Description]) -> list[int | None]:
    """Return for each loader the index of the saved one whose state it takes; None: it is new.

    As many loaders as were saved take the states in order, unless they changed places.
    """
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


def positions(loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return the position of each loader that knows one (torchdata's), which is this rank's own."""
    return [loader.state_dict() if hasattr(loader, "state_dict") else None for loader in loaders]


def load_positions(
    comm: Communicator, loaders: Sequence[Any], saved: Sequence[dict[str, Any] | None]
) -> None:
    """Take over what `positions` returned on this rank.

    Raises:
        CheckpointError: if a loader knows its position and no state was saved for it, or ranks were
            in different epochs.
    """
    stateful = {i: one for i, one in enumerate(loaders) if hasattr(one, "load_state_dict")}
    states = {index: saved[index] if index < len(saved) else None for index in stateful}
    mine = {index: _epoch(state) for index, state in states.items()}
    ranks = comm.all_gather_object(mine) if stateful and comm.world_size > 1 else [mine]
    for index in stateful:
        found = [epochs[index] for epochs in ranks]
        if None in found:
            rule = f"the checkpoint holds no position of it on rank {found.index(None)}"
            remedy = (
                "Resume with use_stateful_dataloader, and as many processes and replicas of the "
                "model as when it was saved."
            )
            raise CheckpointError(Problem(f"stateful data loader {index}", rule, remedy))
        if len(set(found) - {_NONE}) > 1:
            value = f"stateful data loader {index}, saved in epochs {found} of the ranks"
            rule = "a pass begins on all ranks together"
            raise CheckpointError(Problem(value, rule, "Save on all ranks in the same epoch."))
    for index, loader in stateful.items():
        loader.load_state_dict(states[index])


_NONE = -1  # of a position that has no epoch


def _epoch(state: dict[str, Any] | None) -> int | None:
    """Return the epoch of a saved position; None if there is no position."""
    if state is None:
        return None
    order = state.get("accel", {}).get("order")
    return _NONE if order is None else int(order["epoch"])
