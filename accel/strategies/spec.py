"""What describes a strategy: its plugins, what it owns, its dimensions and checks. Free of torch.

Each room exports one `StrategySpec`; `accel/strategies/table.py` lists ours, and those of other
packages are found through the entry point group ``accel.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from accel.config.handlers import KwargsHandler
from accel.config.parallelism import ParallelismConfig
from accel.config.training import TorchDynamoPlugin
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem
from accel.plan.dims import ParallelDims, data_parallel

Plugin = TypeVar("Plugin")
# The plugins of a run that are on, by name.
Plugins = Mapping[str, Any]
# What a run decides beside its plugins: (value, source for messages) by name. The names are
# micro_batch_size, global_batch_size, accumulation_steps and clip_grad_norm.
Decided = Mapping[str, tuple[object, str]]


@dataclass(frozen=True)
class PluginSpec:
    """A plugin that switches a strategy on, and every place where it can be given.

    Args:
        name: of the plugin: the key of its node in a recipe.
        kind: its dataclass, free of torch: the schema of that node; None: the sizes of
            axes alone switch it on (`sized`), and a recipe has no node for it.
        label: what run headers, manifests and messages call a run under it; "": `name`.
        reported: the run's `DistributedType`; None: that of its device.
        argument: keyword argument of `Accelerator`; "": it is given in `strategy_plugins`.
        aliases: other spellings of that argument.
        switch: environment variable that switches the plugin on; "": there is none.
        prefixes: beginnings of the names of environment variables that fill its fields.
        read: called with what was given (None: the switch is on) and these variables; returns the
            plugin, or raises `ConfigError`. None: the plugin as given, else with its defaults.
        adopt: returns a copy of a plugin that knows what the run decides; None: nothing of it.
        frozen_fields: returns the fields of a plugin that a frozen recipe records otherwise, such
            as the content of a file that it names; None: none.
        callables: fields that import what a dotted name stands for: a recipe names trusted code.
        sized: returns the plugin, from the one that is on or None, with the sizes of the axes that
            a run requests; None: these do not switch it on.
        shared: whether later `Accelerator`s of the process that name no plugin take it over.
        launch_variables: settings of `accel launch` and its file, with the variable of each.
        not_launched: further documented settings of it, with what to do instead; "": nothing, they
            have no effect.
    """

    name: str
    kind: type[object] | None
    label: str = ""
    reported: DistributedType | None = None
    argument: str = ""
    aliases: tuple[str, ...] = ()
    switch: str = ""
    prefixes: tuple[str, ...] = ()
    read: Callable[[object, Mapping[str, str]], object] | None = None
    adopt: Callable[[Any, Decided], object] | None = None
    frozen_fields: Callable[[Any], Mapping[str, object]] | None = None
    callables: tuple[str, ...] = ()
    sized: Callable[[Any, ParallelismConfig], object] | None = None
    shared: bool = False
    launch_variables: Mapping[str, str] = field(default_factory=dict)
    not_launched: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused_launched(self) -> dict[str, str]:
        """The settings that `accel launch` refuses, with what to do instead."""
        return {name: remedy for name, remedy in self.not_launched.items() if remedy}

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the environment variables that fill fields of the plugin and are not empty."""
        return {
            name: text
            for name, text in sorted(environment.variables.items())
            if self.prefixes and name.startswith(self.prefixes) and text.strip()
        }

    def resolved(self, given: object, environment: Environment) -> object:
        """Return the plugin, filled from the environment; `given` is None where its switch is on.

        Raise a `ConfigError` that names every value that makes no sense.
        """
        if self.read is not None:
            return self.read(given, self.variables(environment))
        kind = cast(type[object], self.kind)  # one without is switched on by sizes alone
        if given is None:
            return kind()
        return require_kind(self.argument or "strategy_plugins", given, kind)


def require_kind(where: str, given: object, kind: type[Plugin]) -> Plugin:
    """Return `given`, or raise `ConfigError` if it is no plugin of the class `kind`."""
    if not isinstance(given, kind):
        name = kind.__name__
        raise ConfigError.of(f"{where}={given!r}", f"it is a {name}", f"Give {where}={name}(…).")
    return given


@dataclass(frozen=True)
class Request:
    """What a strategy is to do, resolved as far as it does not depend on the strategy.

    `plugins` are those of the strategy that are on, by name; other fields are as of `Plan`.
    """

    plugins: Plugins
    environment: Environment
    device_type: str
    mixed_precision: str
    dynamo: TorchDynamoPlugin


def replicated(
    plugins: Plugins, environment: Environment, sizes: ParallelismConfig
) -> ParallelDims:
    """Return the dimensions of a run in which every process holds the model."""
    return data_parallel(environment.world_size, 0)


@dataclass(frozen=True)
class MemoryLayout:
    """What one process holds of a model that trains, under one way to distribute it.

    Args:
        name: of the way, as a table of estimates shows it.
        sharded: which are sharded over the processes: "parameters", "gradients", "optimizer".
        casts_weights: whether weights and gradients of mixed precision are in 16 bits, beside fp32
            master weights in the optimizer.
        copies_fp32: whether there are master weights of fp32 weights, too.
    """

    name: str
    sharded: frozenset[str] = frozenset()
    casts_weights: bool = False
    copies_fp32: bool = False


@dataclass(frozen=True)
class StrategySpec:
    """A way to distribute a model, as far as it is known without torch.

    Args:
        name: of the strategy.
        place: ``"module:class"`` of its `Strategy`, called with (plan, comm, device, precision).
        plugins: what switches it on. The first one that is on names the run.
        is_default: whether a run that switches no plugin on is of this strategy, by its world size
            and kind of device.
        reported: the `DistributedType` of runs without a plugin; None: that of their device.
        handlers: kwargs handlers that no strategy reads but those that name them here.
        owns_precision: whether it casts weights by itself, below autocast, and scales losses
            where that is wanted.
        owns_accumulation: whether it counts micro-batches itself.
        owns_parameters: whether optimizers hold tensors of the strategy after `prepare`, and not
            the models' own parameters.
        hooks_inside: whether it works between the layers of a model, so that `torch.compile` takes
            its repeated blocks unless the run says otherwise.
        clips_value: whether single gradient elements can be clipped.
        packages: distributions whose versions a run records.
        dims: parallel dimensions of a run, seen from rank 0, from its plugins, the numbers of
            processes and the sizes that were requested (1 where none was), which it may leave to
            the caller to compare; raises `ConfigError` where these do not fit.
        precision: the mixed precision of a run, from its plugins and the one that was requested
            (lower case; None: none was), which is the answer unless a plugin implies another.
        accumulation_steps: micro-batches per optimizer step that a plugin implies; None: none.
        rank0_init: the setting of a plugin by which models get weights on rank 0 only and no
            memory on the others, as messages call it; "": there is none.
        memory: what a process holds, for estimates; one entry for each way to shard.
        problems: what the strategy cannot do of a request.
        notes: what a person should know of a request that is possible.
    """

    name: str
    place: str
    plugins: tuple[PluginSpec, ...] = ()
    is_default: Callable[[int, str], bool] = lambda world_size, device_type: False
    reported: DistributedType | None = None
    handlers: tuple[type[KwargsHandler], ...] = ()
    owns_precision: bool = False
    owns_accumulation: bool = False
    owns_parameters: bool = False
    hooks_inside: bool = False
    clips_value: bool = True
    packages: tuple[str, ...] = ()
    dims: Callable[[Plugins, Environment, ParallelismConfig], ParallelDims] = replicated
    precision: Callable[[Plugins, str | None], str | None] = lambda plugins, given: given
    accumulation_steps: Callable[[Plugins], int | None] = lambda plugins: None
    rank0_init: Callable[[Plugins], str] = lambda plugins: ""
    memory: tuple[MemoryLayout, ...] = ()
    problems: Callable[[Request], list[Problem]] = lambda request: []
    notes: Callable[[Request], list[str]] = lambda request: []

    def leading(self, plugins: Plugins) -> PluginSpec | None:
        """Return the plugin that names a run; None for a strategy without plugins."""
        return next((plugin for plugin in self.plugins if plugin.name in plugins), None)

    def label(self, plugins: Plugins) -> str:
        """Return what headers, manifests and messages call a run with these plugins."""
        leading = self.leading(plugins)
        return self.name if leading is None else leading.label or leading.name
