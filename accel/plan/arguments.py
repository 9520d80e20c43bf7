"""What a caller asks for, before the environment and the machine have their say."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.config.checks import check_types
from accel.config.handlers import KwargsHandler
from accel.config.parallelism import SWITCH, ParallelismConfig, one_of_each
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import DynamoBackend, PrecisionType, RNGType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problems, nearest
from accel.plan.dims import AXES, CP, PP, TP, ParallelDims
from accel.strategies.spec import Plugins, PluginSpec, StrategySpec
from accel.strategies.table import plugins, specs


class _NotGiven(int):
    """A default that reads and counts as its number, and differs from the number given."""


ONE_BY_DEFAULT = _NotGiven(1)
_INSTANCES: dict[str, type] = {
    "dataloader_config": DataLoaderConfiguration,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
}


@dataclass
class Arguments:
    """The arguments of `Accelerator` that decide how a run is set up.

    `plugins` are those of strategies, by the argument that each one is given in. `accumulation` is
    what an earlier `Accelerator` of the process set, which one that says nothing of it keeps.
    """

    device_placement: bool = True
    split_batches: bool | None = None
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = ONE_BY_DEFAULT
    cpu: bool = False
    device: str | None = None
    dataloader_config: DataLoaderConfiguration | None = None
    plugins: Plugins = field(default_factory=dict)
    strategy_plugins: Sequence[object] = ()
    rng_types: Sequence[str | RNGType] | None = None
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    kwarg_handler: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    parallelism_config: ParallelismConfig | None = None
    accumulation: GradientAccumulationPlugin | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Return keyword arguments of `Accelerator` without those that decide nothing here."""
        known = {field.name for field in dataclasses.fields(cls)} - {"plugins", "accumulation"}
        names = [name for plugin in plugins() for name in (plugin.argument, *plugin.aliases)]
        return cls(
            plugins={name: given[name] for name in names if given.get(name) is not None},
            **{name: value for name, value in given.items() if name in known},
        )

    @property
    def names_a_strategy(self) -> bool:
        """Whether a plugin is given."""
        return bool(self.strategy_plugins) or any(v is not None for v in self.plugins.values())

    def checked(self, problems: Problems) -> Arguments:
        """Return the arguments without those of a wrong type, each of which adds a problem."""
        arguments = dataclasses.replace(self)
        count = len(problems)
        check_types(arguments, problems, where="", skip=("gradient_accumulation_steps",))
        wrong = {problem.value.partition("=")[0] for problem in problems[count:]}
        for name, kind in _INSTANCES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                remedy = f"Give {name}={kind.__name__}(…)."
                problems.add(f"{name}={value!r}", f"it is a {kind.__name__}", remedy)
                wrong.add(name)
        handlers = [*(self.kwargs_handlers or ()), *(self.kwarg_handler or ())]
        defaults = Arguments()
        valid = {name: getattr(defaults, name) for name in wrong}
        return dataclasses.replace(arguments, kwargs_handlers=handlers, kwarg_handler=None, **valid)


# -- which strategy distributes the model, as plugins or the environment sw -------------------


@dataclass(frozen=True)
class Choice:
    """The strategy of a run, and the plugins that are on; of several where a request is wrong."""

    spec: StrategySpec
    plugins: Plugins
    sizes: ParallelismConfig | None = None

    @property
    def label(self) -> str:
        """What headers, manifests and messages call the run."""
        return self.spec.label(self.plugins)

    def dims(self, environment: Environment, found: Problems) -> ParallelDims:
        """Return the parallel dimensions, seen from rank 0; note where there are none."""
        try:
            if environment.world_size >= 1:
                return self.fitting_dims(environment)
        except ConfigError as error:
            found.take(error)
        return ParallelDims()

    def fitting_dims(self, environment: Environment) -> ParallelDims:
        """Return the parallel dimensions, seen from rank 0; `ConfigError` where they do not fit."""
        sizes, world_size = self.sizes or one_of_each(), environment.world_size
        dims = self.spec.dims(self.plugins, environment, sizes)
        if dims.world_size == world_size:
            return dims
        plugins = ", ".join(f"{name}={plugin!r}" for name, plugin in self.plugins.items())
        product = " × ".join(f"{axis}={dims.size(axis)}" for axis in AXES if dims.size(axis) > 1)
        raise ConfigError.of(
            f"strategy {self.spec.name!r} with {plugins or 'no plugin'}",
            f"its parallel dimensions ({product or 'all of size 1'}) need as many processes as "
            f"their product, {dims.world_size}, and the world size is {world_size}",
            f"Start {dims.world_size}, or choose sizes whose product is {world_size}.",
        )


def choose(
    arguments: Arguments, environment: Environment, device_type: str, found: Problems
) -> Choice:
    """Return the strategy that is switched on; an argument goes before the environment.

    `found` takes what is wrong: two strategies on, a plugin of another class.
    """
    given = _given(arguments, found)
    on: dict[str, object] = {}
    requested: list[str] = []
    for plugin in plugins():
        try:
            if plugin.name not in given and not (plugin.switch and environment.flag(plugin.switch)):
                continue
            requested.append(plugin.name)
            on[plugin.name] = plugin.resolved(given.get(plugin.name), environment)
        except ConfigError as error:
            found.take(error)
    for first, second in conflicts(requested):
        rule, remedy = "they cannot be combined", f"Switch {first} or {second} off."
        found.add(f"{first} with {second}", rule, remedy)
    sizes = parallelism(arguments, environment, found)
    _apply_sizes(on, sizes, found)
    choice = selected(on, environment.world_size, device_type)
    own = selected({}, environment.world_size, device_type).spec
    if choice.spec is not own and own is not selected({}, environment.world_size).spec:
        rule = f"models are distributed by {own.name} there"
        found.add(f"{choice.label} on {device_type}", rule, "Leave it out, or use cpu=True.")
    return dataclasses.replace(choice, sizes=sizes)


def parallelism(
    arguments: Arguments, environment: Environment, found: Problems
) -> ParallelismConfig | None:
    """Return the sizes of the axes that a run requests, as an argument or by the environment."""
    if arguments.parallelism_config is not None or not environment.flag(SWITCH):
        return arguments.parallelism_config
    return found.collect(ParallelismConfig)


def _apply_sizes(on: dict[str, object], sizes: ParallelismConfig | None, found: Problems) -> None:
    """Give the sizes of the axes to the plugins of the strategy that is on, or switch some on."""
    owner = next((spec for spec in specs() if spec.leading(on)), None)
    for plugin in plugins() if owner is None else owner.plugins:
        if sizes is None or plugin.sized is None:
            continue
        sized = found.collect(plugin.sized, on.get(plugin.name), sizes)
        if sized is not None:
            on[plugin.name] = sized


def check_sizes(sizes: ParallelismConfig, dims: ParallelDims, found: Problems) -> None:
    """Note the axes that have another size than requested."""
    wanted_sizes = {axis: sizes.size(axis) for axis in AXES}
    wanted_sizes[CP] *= sizes.sp_size  # one axis of ranks that compute parts of a sequence
    wrong = {
        axis: (size, dims.size(axis))
        for axis, size in wanted_sizes.items()
        if size != dims.size(axis)
    }
    if not wrong:
        return
    for axis in (PP, CP, TP):
        if axis in wrong and dims.size(axis) == 1:
            given = f"{axis}_size"
            remedy = "Leave it out, give the size to the strategy's plugin, or choose another one."
            if axis == CP:
                given, other = sorted(("cp_size", "sp_size"), reverse=sizes.sp_enabled)
                remedy = f"Give {other} instead, or leave it out."
            value = f"ParallelismConfig({given}={wrong[axis][0]})"
            rule = "the strategy that is on has one process on this axis"
            found.add(value, rule, remedy)
            return
    wanted = ", ".join(f"{axis}_size={size}" for axis, (size, _) in wrong.items())
    got = ", ".join(f"{axis}={size}" for axis, (_, size) in wrong.items())
    found.add(
        f"ParallelismConfig({wanted})",
        f"its sizes give {sizes.total_size} processes; {dims.world_size} processes and the "
        f"strategy that is on give {got}",
        f"Start {sizes.total_size} processes with that strategy, or change the sizes.",
    )


def selected(on: Plugins, world_size: int, device_type: str = "cpu") -> Choice:
    """Return the strategy of the plugins that are on, or the default of processes on a device."""
    chosen = (spec for spec in specs() if spec.leading(on))
    default = (spec for spec in specs() if spec.is_default(world_size, device_type))
    return Choice(next(chosen, None) or next(default), on)


def conflicts(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of plugins, of those that are on, that belong to different strategies."""
    owners = {plugin.name: spec.name for spec in specs() for plugin in spec.plugins}
    for first, second in itertools.combinations(names, 2):
        if owners[first] != owners[second]:
            yield first, second


def _given(arguments: Arguments, found: Problems) -> Mapping[str, object]:
    given: dict[str, object] = {}
    sources: dict[str, str] = {}

    def put(plugin: PluginSpec, value: object, source: str) -> None:
        if plugin.name in given:
            found.add(
                f"{sources[plugin.name]} with {source}",
                "they are two spellings of one argument",
                f"Give {source} alone.",
            )
        given[plugin.name], sources[plugin.name] = value, source

    for plugin in plugins():
        for name in filter(None, (plugin.argument, *plugin.aliases)):
            if arguments.plugins.get(name) is not None:
                put(plugin, arguments.plugins[name], name)
    for value in arguments.strategy_plugins:
        kinds = [plugin for plugin in plugins() if plugin.kind is not None]
        # By the nearest class: a plugin may be derived from that of another strategy.
        bases = type(value).__mro__
        owner = next((p for base in bases for p in kinds if p.kind is base), None)
        if owner is None:
            known = [plugin.kind.__name__ for plugin in kinds if plugin.kind]
            rule = f"each is one of {', '.join(known)}"
            remedy = nearest(type(value).__name__, known)
            found.add(f"strategy_plugins: {value!r}", rule, remedy)
        else:
            put(owner, value, "strategy_plugins")
    return given
