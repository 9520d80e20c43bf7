"""FSDP units of a model: the modules whose parameters are sharded and all-gathered together.

Modules that are ignored are in none: FSDP2 neither shards their parameters, nor moves them to the
device, nor reduces their gradients.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from accel.config.checks import import_callable
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError, Problem, nearest
from accel.strategies.mesh.torch_internals import is_wrap_policy, modules_of_policy

Modules = list[torch.nn.Module]
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def check_classes(models: Sequence[torch.nn.Module], names: Sequence[str] | None) -> None:
    """Raise a `ConfigError` that names every given class that none of a call's models has."""
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
    """Return the name of the user's class, which FSDP2 derives a class of its own from."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if isinstance(module, FSDPModule) else kind.__name__


def find_units(
    model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter]
) -> Modules:
    """Return the modules within `model` that are units of their own, inner ones first.

    `ignored` parameters are not sharded. Raise `ConfigError` for transformer_based_wrap, if neither
    plugin nor model names any blocks.
    """
    chosen = {id(module) for module in _chosen(model, plugin, ignored)}
    ordered = [m for m in reversed(list(model.modules())) if id(m) in chosen and m is not model]
    own = [m for m in ordered if not isinstance(m, CONTAINERS) and set(m.parameters()) - ignored]
    tied = tied_parameters(model)
    # What has weights tied to other modules belongs to the unit around them.
    return [module for module in own if holds_all_uses(module, tied)]


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
    if is_wrap_policy(policy):
        return modules_of_policy(policy, model)
    import_callable(plugin, "auto_wrap_policy")
    return _by_callable(model, plugin.auto_wrap_policy, ignored)


def _by_class(model: torch.nn.Module, names: Sequence[str] | None, required: bool) -> Modules:
    classes = sorted({type(module).__name__ for module in model.modules()})
    if not names:
        own = getattr(model, "_no_split_modules", None) or ()
        present = [name for name in own if name in classes]
        if required and not present:
            raise ConfigError.of(
                "auto_wrap_policy='transformer_based_wrap'",
                "it needs transformer_cls_names_to_wrap, as the model names no blocks itself "
                "(_no_split_modules)",
                f"Name some of its classes: {', '.join(classes)}.",
            )
        names = present
    return [module for module in model.modules() if type(module).__name__ in names]


def _by_callable(
    model: torch.nn.Module, policy: Callable[..., bool], ignored: set[torch.nn.Parameter]
) -> Modules:
    """Call `policy(module=, recurse=, nonwrapped_numel=)` as torch's older wrapper does."""
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


# -- tied weights --------------------------------------------------------------------------


def tied_parameters(model: torch.nn.Module) -> dict[int, int]:
    """Return the number of modules that register a tied parameter, by its id."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update({id(parameter) for parameter in module.parameters(recurse=False)})
    return {key: count for key, count in uses.items() if count > 1}


def holds_all_uses(module: torch.nn.Module, tied: dict[int, int]) -> bool:
    """Return whether the module's parameters, of those tied in a model, are all tied within it."""
    uses: Counter[int] = Counter()
    for inner in module.modules():
        uses.update({id(p) for p in inner.parameters(recurse=False) if id(p) in tied})
    return all(count == tied[key] for key, count in uses.items())


# -- ignored modules -----------------------------------------------------------------------


def ignored_modules(
    model: torch.nn.Module, given: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None
) -> Modules:
    """Return the modules that are not sharded, in the model's order, so that all ranks agree.

    `given` are modules, or names and regular expressions of names; None: none. Raise `ConfigError`
    for entries that match no module of the model.
    """
    if given is None:
        return []
    entries = [given] if isinstance(given, (str, torch.nn.Module)) else list(given)
    named = dict(model.named_modules())
    found: set[torch.nn.Module] = set()
    problems = []
    for entry in entries:
        if isinstance(entry, torch.nn.Module):
            matches = [module for module in named.values() if module is entry]
        else:
            matches = [m for name, m in named.items() if name and re.fullmatch(str(entry), name)]
        found.update(matches)
        if not matches:
            value = entry if isinstance(entry, str) else type(entry).__name__
            remedy = nearest(value, [name for name in named if name])
            rule = "no module of the model has this name"
            problems.append(Problem(f"ignored_modules: {value!r}", rule, remedy))
    ConfigError.raise_if(problems)
    return [module for module in named.values() if module in found]


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the current parameters of `modules`: materializing and sharding replace them."""
    found = (parameter for module in modules for parameter in module.parameters())
    return list(dict.fromkeys(found))
