"""Which modules FSDP2 gathers as one: the units of a model.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from accel.config.checks import import_callable
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.errors import ConfigError, Problem, nearest
from accel.logging import get_logger
from accel.strategies.mesh.units_by_dtype import holds_all_uses, shared_parameters

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
    shared = shared_parameters(model)
    inside = [module for module in own if holds_all_uses(module, shared)]
    if len(inside) < len(own):
        logger.warning(
            "FSDP: %s share parameters with other modules; they belong to the unit around them.",
            ", ".join(sorted({type(m).__name__ for m in own if m not in inside})),
        )
    return inside


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
