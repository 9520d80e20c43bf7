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


_BEGUN = ("under way", "left")


def positions(loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return the position of each loader that knows one (torchdata's), which is this rank's own."""
    return [loader.state_dict() if hasattr(loader, "state_dict") else None for loader in loaders]


def load_positions(
    comm: Communicator, loaders: Sequence[Any], saved: Sequence[dict[str, Any] | None]
) -> None:
    """Take over what `positions` returned on this rank.

    Ranks may have been at different batches of a pass. One that had read its last gets an empty
    pass where others resume theirs, so that all begin the next one together.

    Raises:
        CheckpointError: if a loader knows its position and no state was saved for it, or ranks were
            in different epochs.
    """
    stateful = {i: one for i, one in enumerate(loaders) if hasattr(one, "load_state_dict")}
    states = {index: saved[index] if index < len(saved) else None for index in stateful}
    mine = {index: _standing(state) for index, state in states.items()}
    ranks = comm.all_gather_object(mine) if stateful and comm.world_size > 1 else [mine]
    for index in stateful:
        missing = [rank for rank, found in enumerate(ranks) if found[index] is None]
        if missing:
            rule = f"the checkpoint holds no position of it on rank {missing[0]}"
            remedy = (
                "Resume with use_stateful_dataloader, and as many processes and replicas of the "
                "model as when it was saved."
            )
            raise CheckpointError(Problem(f"stateful data loader {index}", rule, remedy))
    for index, loader in stateful.items():
        found: list[Any] = [standing[index] for standing in ranks]
        behind = _furthest_behind(index, found)
        if behind is None:
            loader.load_state_dict(states[index])
            continue
        state = states[index] or {}
        own = state["accel"]["order"] if comm.rank == behind else None
        order = comm.all_gather_object(own)[behind]
        if found[comm.rank] and found[comm.rank][0] > found[behind][0]:
            loader.load_state_dict({"accel": {"order": order, "position": {}}})
            loader._order.read_elsewhere = True
        else:
            loader.load_state_dict(state)


def _standing(state: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the epoch and "pass" of a saved state, () if it has none, None if there is none."""
    if state is None:
        return None
    order = state.get("accel", {}).get("order")
    return () if order is None else (order["epoch"], order["order"]["pass"])


def _furthest_behind(index: int, ranks: Sequence[Any]) -> int | None:
    """Return a rank that was in a pass which others had ended, None if all were in one epoch.

    Raise `CheckpointError` if passes cannot begin together again.
    """
    found = {rank: standing for rank, standing in enumerate(ranks) if standing}
    first: int = min((epoch for epoch, _ in found.values()), default=0)
    ahead = [standing for standing in found.values() if standing[0] != first]
    if not ahead:
        return None
    if any(epoch != first + 1 or at in _BEGUN for epoch, at in ahead):
        raise CheckpointError(_different_epochs(index, found))
    there = [rank for rank, (epoch, _) in found.items() if epoch == first]
    return next((rank for rank in there if found[rank][1] in _BEGUN), there[0])


def _different_epochs(index: int, found: dict[int, tuple[Any, str]]) -> Problem:
    listed = ", ".join(f"rank {rank}: {epoch} ({at})" for rank, (epoch, at) in found.items())
    return Problem(
        f"stateful data loader {index}, saved in different epochs ({listed})",
        "a pass begins on all ranks together, so that a rank may be at most at the end of the pass "
        "that others are in",
        "Save on all ranks in the same epoch.",
    )
