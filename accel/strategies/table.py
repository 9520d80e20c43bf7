"""The table of strategies: where each one's spec is. Free of torch.

A package adds a strategy by an entry point of the group ``accel.strategies``::

    [project.entry-points."accel.strategies"]
    mine = "mypackage.spec:SPEC"

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from accel.config.handlers import DistributedDataParallelKwargs
from accel.machine.errors import ConfigError, Problem, Problems, unknown_choice
from accel.machine.imports import load_attribute
from accel.strategies.spec import MemoryLayout, PluginSpec, StrategySpec

GROUP = "accel.strategies"
STRATEGIES = (
    "accel.strategies.table:SINGLE",
    "accel.strategies.table:DDP",
    "accel.strategies.mesh.spec:SPEC",
    "accel.strategies.deepspeed.spec:SPEC",
    "accel.strategies.xla.spec:SPEC",
    "accel.strategies.megatron.spec:SPEC",
)


@cache
def specs() -> tuple[StrategySpec, ...]:
    """Return the specs of all strategies, ours first.

    Raise a `ConfigError` that names every entry point that leads to no spec, or to a taken name.
    """
    found: list[StrategySpec] = [load_attribute(place) for place in STRATEGIES]
    problems = Problems()
    found += filter(None, [problems.collect(_loaded, entry) for entry in entry_points(group=GROUP)])
    ConfigError.raise_if([*problems, *_taken_twice(found)])
    return tuple(found)


def named(name: str) -> StrategySpec:
    """Return the spec of the strategy `name`, or raise `ConfigError` where there is none."""
    known = {spec.name: spec for spec in specs()}
    if name not in known:
        raise ConfigError(unknown_choice("strategy", name, known))
    return known[name]


# In a pickle a spec is its name: its functions are code, which may be lambdas.
copyreg.pickle(StrategySpec, lambda spec: (named, (spec.name,)))


def plugins() -> tuple[PluginSpec, ...]:
    """Return the plugins of all strategies."""
    return tuple(plugin for spec in specs() for plugin in spec.plugins)


def _loaded(entry: EntryPoint) -> StrategySpec:
    """Return the spec that an entry point names, or raise `ConfigError`."""
    package = entry.dist.name if entry.dist is not None else entry.module
    where = f"entry point {GROUP}: {entry.name} = {entry.value} ({package})"
    try:
        spec = entry.load()
    except Exception as error:
        rule = f"loading it failed with {type(error).__name__}: {error}"
        raise ConfigError.of(where, rule, f"Correct or uninstall {package}.") from error
    if not isinstance(spec, StrategySpec):
        rule = f"it is a StrategySpec, not {type(spec).__name__}"
        raise ConfigError.of(where, rule, f"Correct or uninstall {package}.")
    return spec


def _taken_twice(found: Iterable[StrategySpec]) -> list[Problem]:
    found = tuple(found)
    given = [plugin for spec in found for plugin in spec.plugins]
    names = {
        "strategy": [spec.name for spec in found],
        "plugin": [plugin.name for plugin in given],
        "argument of Accelerator": [
            name for plugin in given for name in (plugin.argument, *plugin.aliases) if name
        ],
    }
    return [
        Problem(f"{what} {name!r}", f"{count} strategies name it so", "Rename or uninstall one.")
        for what, known in names.items()
        for name, count in Counter(known).items()
        if count > 1
    ]


# Kinds of device with a strategy of their own.
OWN_STRATEGY = ("xla",)
SINGLE = StrategySpec(
    name="single",
    place="accel.strategies.base:SingleProcessStrategy",
    is_default=lambda size, device_type: size <= 1 and device_type not in OWN_STRATEGY,
    handlers=(DistributedDataParallelKwargs,),
)
DDP = StrategySpec(
    name="ddp",
    place="accel.strategies.ddp:DDPStrategy",
    is_default=lambda size, device_type: size > 1 and device_type not in OWN_STRATEGY,
    handlers=(DistributedDataParallelKwargs,),
    memory=(MemoryLayout("ddp"),),
)
