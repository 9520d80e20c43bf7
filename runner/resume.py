"""What a resumed run keeps of its recipe, and what the new command line changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# These say when one invocation stops; a resumed run does not inherit them.
PER_INVOCATION = (("resume",), ("trainer", "stop_after"), ("trainer", "max_time"))
# How far a run goes. They may change from one invocation to the next, also of a finished run.
LIMITS = (*PER_INVOCATION, ("trainer", "epochs"), ("trainer", "max_steps"))
# What makes no other run of it for `resume=auto`: how far it goes, where it is computed and told.
SAME_RUN = (
    *LIMITS,
    *(("name",), ("output_dir",), ("tags",), ("distributed",), ("tracker",), ("profile",)),
    *(("dataloader", "num_workers"), ("dataloader", "pin_memory")),
    *(("dataloader", "prefetch_factor"), ("dataloader", "persistent_workers")),
)


def carry_over(frozen: Any, before: Any, after: Any) -> Any:
    """Return `frozen` with what differs between `before` and `after` taken from `after`.

    A run goes on with the recipe it was started with, even if files of `conf/` have changed since.
    New overrides may choose whole groups, so what they mean is read off two compositions.

    Args:
        frozen: the recipe of the run, as plain containers.
        before: today's composition of the run's own overrides.
        after: today's composition of those and the new ones.
    """
    if before == after:
        return frozen
    if not all(isinstance(node, Mapping) for node in (frozen, before, after)):
        return after
    missing = object()
    result = {}
    for key in [*frozen, *(key for key in after if key not in frozen)]:
        value = carry_over(
            frozen.get(key, missing), before.get(key, missing), after.get(key, missing)
        )
        if value is not missing:
            result[key] = value
    return result


def without_limits(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe as plain containers with the keys of one invocation set to null."""
    result = dict(recipe)
    for *parents, key in PER_INVOCATION:
        node = result
        for parent in parents:
            node[parent] = dict(node[parent])
            node = node[parent]
        node[key] = None
    return result


def differences(
    there: Any, here: Any, but_for: Sequence[tuple[str, ...]] = (), key: tuple[str, ...] = ()
) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value there, value here) of what two recipes do not have in common.

    Args:
        there: a recipe as plain containers, or a part of one.
        here: another.
        but_for: keys that do not count, with everything below them.
        key: where the part lies in the recipe.
    """
    if there == here or key in but_for:
        return []
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [(".".join(key), there, here)]
    found = []
    for name in [*there, *(name for name in here if name not in there)]:
        found += differences(there.get(name), here.get(name), but_for, (*key, str(name)))
    return found
