"""The state of data loaders: what decides the order of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel.data.base import PreparedLoader, check_samplers
from accel.data.samplers import inner_sampler
from accel.errors import CheckpointError, Problem


def loader_state(loader: Any) -> dict[str, Any]:
    """Return what decides the order of a loader's samples, the same on every rank.

    Returns:
        What `PreparedLoader.order_state` returns; of another loader, the first three entries.
    """
    if isinstance(loader, PreparedLoader):
        return loader.order_state()
    return {
        "epoch": getattr(loader, "epoch", None),
        "samplers": [sampler.state_dict() for sampler in _stateful(loader)],
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def load_loader_state(loader: Any, state: dict[str, Any]) -> None:
    """Take over what `loader_state` returned.

    Raises:
        CheckpointError: if the loader has other samplers than the saved one.
    """
    if isinstance(loader, PreparedLoader):
        loader.load_order_state(state)
        return
    stateful = list(_stateful(loader))
    check_samplers(len(stateful), len(state["samplers"]))
    if state["epoch"] is not None and hasattr(loader, "set_epoch"):
        loader.set_epoch(state["epoch"])
    for sampler, saved in zip(stateful, state["samplers"], strict=True):
        sampler.load_state_dict(saved)
    for generator, saved in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(saved)


def positions(loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return the position of each loader that knows one (torchdata's), which is this rank's own."""
    return [loader.state_dict() if hasattr(loader, "state_dict") else None for loader in loaders]


def load_positions(loaders: Sequence[Any], saved: Sequence[dict[str, Any] | None]) -> None:
    """Take over what `positions` returned on this rank.

    Raises:
        CheckpointError: if a loader knows its position and no state was saved for it.
    """
    for index, loader in enumerate(loaders):
        if not hasattr(loader, "load_state_dict"):
            continue
        state = saved[index] if index < len(saved) else None
        if state is None:
            rule = "the checkpoint holds no position of it on this rank"
            remedy = (
                "Resume with use_stateful_dataloader, and as many processes and replicas of the "
                "model as when it was saved."
            )
            raise CheckpointError(str(Problem(f"stateful data loader {index}", rule, remedy)))
        loader.load_state_dict(state)


def _samplers(loader: Any) -> Iterator[Any]:
    sampler = inner_sampler(loader)
    while sampler is not None:
        yield sampler
        sampler = inner_sampler(sampler)


def _stateful(loader: Any) -> Iterator[Any]:
    return (
        s for s in _samplers(loader) if hasattr(s, "state_dict") and hasattr(s, "load_state_dict")
    )


def _generators(loader: Any) -> Iterator[torch.Generator]:
    found = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader))]
    unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return iter(unique.values())
