"""Units of one dtype each, as FSDP2 wants them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from accel.errors import ConfigError, Problem

Modules = list[torch.nn.Module]


def split_by_dtype(
    model: torch.nn.Module, units: Modules, ignored: set[torch.nn.Parameter]
) -> Modules:
    """Return `units`, and before each what it holds of other dtypes than its own.

    FSDP2 wants one dtype of what is trained in a unit. It is that of the parameters which the unit
    holds itself, else the most common one.

    Args:
        model: the unit around all of them.
        units: inner ones first.
        ignored: parameters that are not sharded.

    Raises:
        ConfigError: if a module itself holds several dtypes, or one that must be a unit of its own
            shares parameters.
    """
    dtypes = {id(module): _dtype(module, ignored) for module in model.modules()}
    shared = shared_parameters(model)
    taken: set[int] = set()

    def apart(owner: torch.nn.Module, around: torch.dtype | None) -> Iterator[torch.nn.Module]:
        """Yield what is within `owner` and of other dtypes than `around`, inner ones first."""
        for child in owner.children():
            if id(child) in taken:
                continue
            taken.add(id(child))
            own = dtypes[id(child)]
            yield from apart(child, own or around)
            if own not in (None, around):
                if not holds_all_uses(child, shared):
                    raise ConfigError(_tied(child, own, around))
                yield child

    ordered: Modules = []
    for unit in (*units, model):
        taken.add(id(unit))
        ordered += apart(unit, dtypes[id(unit)] or _most_common(unit, taken, ignored))
        ordered.append(unit)
    return ordered[:-1]


def _dtype(owner: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> torch.dtype | None:
    """Return the dtype of what `owner` itself holds and trains, None for nothing."""
    dtypes = {parameter.dtype for parameter in _trained(owner, ignored)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ConfigError(
            Problem(
                f"prepare: {type(owner).__name__} with parameters of {names}",
                "what FSDP gathers as one is trained in one dtype",
                "Give each dtype a module of its own.",
            )
        )
    return dtypes.pop() if dtypes else None


def _most_common(
    unit: torch.nn.Module, taken: set[int], ignored: set[torch.nn.Parameter]
) -> torch.dtype | None:
    sizes: Counter[torch.dtype] = Counter()
    for owner in unit.modules():
        if id(owner) not in taken:
            for parameter in _trained(owner, ignored):
                sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _tied(owner: torch.nn.Module, own: Any, around: Any) -> Problem:
    return Problem(
        f"prepare: {type(owner).__name__} of {own} in a unit of {around}",
        "it is a unit of its own, and shares parameters with other modules",
        "Give it the dtype of what is around it, or weights of its own.",
    )


def _trained(owner: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    direct = owner.parameters(recurse=False)
    return [p for p in direct if p.requires_grad and p not in ignored]


def shared_parameters(model: torch.nn.Module) -> dict[int, int]:
    """Return how many modules hold a parameter directly, by its id, where several do."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update({id(parameter) for parameter in module.parameters(recurse=False)})
    return {key: count for key, count in uses.items() if count > 1}


def holds_all_uses(module: torch.nn.Module, shared: dict[int, int]) -> bool:
    """Return whether all uses of the module's parameters are inside of it.

    Args:
        module: a part of a model.
        shared: of that model, from `shared_parameters`.
    """
    uses: Counter[int] = Counter()
    for inner in module.modules():
        uses.update({id(p) for p in inner.parameters(recurse=False) if id(p) in shared})
    return all(count == shared[key] for key, count in uses.items())
