"""Which modules FSDP2 gathers as one: the units of a model.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.handlers import import_callable
from accel.errors import ConfigError, Problem, nearest
from accel.logging import get_logger

logger = get_logger(__name__)

Modules = list[torch.nn.Module]
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def check_classes(models: Sequence[torch.nn.Module], names: Sequence[str] | None) -> None:
    """Raise unless each of the named classes is in one of the models at least.

    Args:
        models: of one call of `prepare`; none: nothing is checked.
        names: `FullyShardedDataParallelPlugin.transformer_cls_names_to_wrap`.

    Raises:
        ConfigError: naming every class that no model has.
    """
    present = sorted({_class_name(m) for model in models for m in model.modules()})
    problems = [
        Problem(
            f"transformer_cls_names_to_wrap: {name!r}",
            f"no model of this call has such a class; there are {', '.join(present)}",
            nearest(name, present),
        )
        for name in names or ()
        if models and name not in present
    ]
    ConfigError.raise_if(problems)


def _class_name(module: torch.nn.Module) -> str:
    """Return the name of the user's class, which FSDP2 puts one of its own before."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if isinstance(module, FSDPModule) else kind.__name__


def find_units(
    model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter]
) -> Modules:
    """Return the modules within `model` that are units of their own, inner ones first.

    Args:
        model: not sharded yet.
        plugin: says how units are chosen.
        ignored: parameters that are not sharded.

    Raises:
        ConfigError: for a policy that asks for blocks, where neither it nor the model names any.
    """
    chosen = {id(module) for module in _chosen(model, plugin, ignored)}
    ordered = [m for m in reversed(list(model.modules())) if id(m) in chosen and m is not model]
    own = [m for m in ordered if not isinstance(m, CONTAINERS) and set(m.parameters()) - ignored]
    shared = _shared(model)
    inside = [module for module in own if _keeps(module, shared)]
    if len(inside) < len(own):
        logger.warning(
            "FSDP: %s share parameters with other modules; they belong to the unit around them.",
            ", ".join(sorted({type(m).__name__ for m in own if m not in inside})),
        )
    return inside


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
    shared = _shared(model)
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
                if not _keeps(child, shared):
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


def _shared(model: torch.nn.Module) -> dict[int, int]:
    """Return how many modules hold each parameter directly."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update({id(parameter) for parameter in module.parameters(recurse=False)})
    return {key: count for key, count in uses.items() if count > 1}


def _keeps(module: torch.nn.Module, shared: dict[int, int]) -> bool:
    """Return whether all uses of the module's parameters are inside of it."""
    uses: Counter[int] = Counter()
    for inner in module.modules():
        uses.update({id(p) for p in inner.parameters(recurse=False) if id(p) in shared})
    return all(count == shared[key] for key, count in uses.items())


# -- policies ------------------------------------------------------------------------------


def _chosen(
    model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter]
) -> Iterable[torch.nn.Module]:
    policy = plugin.auto_wrap_policy
    names, least = plugin.transformer_cls_names_to_wrap, plugin.min_num_params
    if policy == "no_wrap":
        return []
    if policy == "size_based_wrap" or (policy is None and least is not None and not names):
        sized = functools.partial(size_based_auto_wrap_policy, min_num_params=int(least or 0))
        return _by_callable(model, sized, ignored)
    if policy in (None, "transformer_based_wrap"):
        return _by_class(model, names, required=policy is not None)
    if hasattr(policy, "_run_policy") and not callable(policy):
        return list(policy._run_policy(model, set(), {}))
    import_callable(plugin, "auto_wrap_policy")
    return _by_callable(model, plugin.auto_wrap_policy, ignored)


def _by_class(model: torch.nn.Module, names: Sequence[str] | None, required: bool) -> Modules:
    classes = sorted({type(module).__name__ for module in model.modules()})
    if not names:
        own = getattr(model, "_no_split_modules", None) or ()
        present = [name for name in own if name in classes]
        if required and not present:
            raise ConfigError(
                Problem(
                    "auto_wrap_policy='transformer_based_wrap'",
                    "it needs transformer_cls_names_to_wrap, as the model names no blocks itself "
                    "(_no_split_modules)",
                    f"Name some of its classes: {', '.join(classes)}.",
                )
            )
        names = present
    return [module for module in model.modules() if type(module).__name__ in names]


def _by_callable(
    model: torch.nn.Module, policy: Callable[..., bool], ignored: set[torch.nn.Parameter]
) -> Modules:
    """Ask `policy(module=, recurse=, nonwrapped_numel=)` as torch's older wrapper does."""
    units: Modules = []

    def visit(module: torch.nn.Module) -> int:
        """Return how many elements below belong to units."""
        size = sum(p.numel() for p in module.parameters() if p not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        inside = sum(visit(child) for child in module.children())
        if policy(module=module, recurse=False, nonwrapped_numel=size - inside):
            units.append(module)
            return size
        return inside

    visit(model)
    return units
