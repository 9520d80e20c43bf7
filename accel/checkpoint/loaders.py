"""The state of a data loader: what decides the order of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel.data.samplers import inner_sampler
from accel.errors import CheckpointError, Problem


def loader_state(loader: Any) -> dict[str, Any]:
    """Return what decides the order of a loader's samples.

    Returns:
        loader: its own `state_dict()`, if it has one (torchdata's stateful loaders).
        samplers: those of its samplers that have one, outermost first.
        generators: the states of the generators of the loader and its samplers.
    """
    return {
        "loader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "samplers": [sampler.state_dict() for sampler in _stateful(loader)],
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def load_loader_state(loader: Any, state: dict[str, Any]) -> None:
    """Take over what `loader_state` returned.

    Raises:
        CheckpointError: if the loader is built in another way than the saved one.
    """
    samplers, generators = list(_stateful(loader)), list(_generators(loader))
    own = state["loader"]
    if (own is None) == hasattr(loader, "load_state_dict") or len(samplers) != len(
        state["samplers"]
    ):
        raise CheckpointError(
            str(
                Problem(
                    f"data loader with {len(samplers)} samplers that have a state",
                    f"the saved one has {len(state['samplers'])}"
                    f"{'' if own is None else ' and a state of its own'}",
                    "Build the loader, and set use_seedable_sampler and use_stateful_dataloader, "
                    "as when it was saved.",
                )
            )
        )
    if own is not None:
        loader.load_state_dict(own)
    for sampler, saved in zip(samplers, state["samplers"], strict=True):
        sampler.load_state_dict(saved)
    # A generator may come or go (synchronised over ranks, say) without a change of order.
    for generator, saved in zip(generators, state["generators"], strict=False):
        generator.set_state(saved)


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
