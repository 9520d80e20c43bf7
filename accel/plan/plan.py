"""From arguments and environment to one frozen `Plan`; every conflict is found here, at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from accel.config.fp8 import RECIPES
from accel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accel.config.parallelism import ParallelismConfig, sequence_problems
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
    is_compiling,
)
from accel.machine.device import process_group_backend, resolve_device
from accel.machine.enums import DistributedType, PrecisionType, RNGType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problems, nearest, unknown_choice
from accel.plan.arguments import ONE_BY_DEFAULT, Arguments, Choice, check_sizes, choose
from accel.plan.dims import ParallelDims
from accel.plan.fp8 import Float8, resolve_fp8
from accel.strategies.spec import Plugins, Request, StrategySpec
from accel.strategies.table import specs

HANDLERS: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    *RECIPES,
)
DISTRIBUTED_TYPES = {"cpu": DistributedType.MULTI_CPU, "cuda": DistributedType.MULTI_GPU}
Handler = TypeVar("Handler", bound=KwargsHandler)


@dataclass(frozen=True)
class Plan:
    """How a run is set up: everything decided, nothing left to the environment.

    Attributes:
        device_type: kind of device, "cpu", "cuda", ….
        device: where this process computes.
        rank, world_size: index of this process among all, and their number.
        local_rank, local_world_size: the same on its node.
        backend: backend of the process group; None for one process.
        strategy: what headers, manifests and messages call the strategy.
        spec: the strategy, as its room describes it.
        plugins: its plugins that are on, by name.
        parallel_dims: sizes of the parallel axes, and what each rank computes.
        parallelism: the sizes of axes that were requested; None: none were.
        distributed_type: what is reported to the user.
        mixed_precision: a value of `PrecisionType`.
        fp8: the library that computes in fp8, and its recipe.
        scaler: behaviour of fp16's gradient scaler.
        accumulation: `num_steps` is a number.
        project: where states and logs go.
        dynamo: compilation.
        device_placement: whether prepared objects and batches are moved to the device.
        step_scheduler_with_optimizer: whether schedulers step when their optimizer does.
        rng_types: generators that ranks synchronise at the start of each epoch.
        debug: whether operations check shapes over ranks first.
        given_handlers: kinds of the handlers that were given; the others have their defaults.
        notes: what a person should know of this run.
        environment: the snapshot that this plan was made from.
    """

    device_type: str
    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    backend: str | None
    strategy: str
    spec: StrategySpec
    plugins: Plugins
    parallel_dims: ParallelDims
    parallelism: ParallelismConfig | None
    distributed_type: DistributedType
    mixed_precision: str
    fp8: Float8
    autocast: AutocastKwargs
    scaler: GradScalerKwargs
    ddp: DistributedDataParallelKwargs
    init: InitProcessGroupKwargs
    profile: ProfileKwargs
    dataloader: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    project: ProjectConfiguration
    dynamo: TorchDynamoPlugin
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: tuple[str, ...]
    debug: bool
    given_handlers: frozenset[type[KwargsHandler]] = field(compare=False)
    notes: tuple[str, ...]
    environment: Environment = field(repr=False)

    def plugin(self, name: str) -> Any:
        """Return the plugin called `name`; None where it is off."""
        return self.plugins.get(name)


def resolve(arguments: Arguments, environment: Environment) -> Plan:
    """Decide how a run is set up. Pure but for asking which devices there are.

    Raises:
        ConfigError: naming everything that contradicts itself or the machine.
    """
    found = Problems()
    arguments = arguments.checked(found)
    device = _device(arguments, environment, found)
    choice = choose(arguments, environment, device.type, found)
    _check_world(environment, found)
    handlers = _handlers(arguments.kwargs_handlers or (), found)
    mixed_precision, fp8 = _mixed_precision(arguments, environment, handlers, choice, device, found)
    dims, sizes = choice.dims(environment, found), choice.sizes
    if sizes is not None and not found:
        check_sizes(sizes, dims, found)
    dataloader = _dataloader(arguments, found)
    accumulation = _accumulation(arguments, environment, choice, found)
    project = _project(arguments, found)
    dynamo = _dynamo(arguments, found)
    request = Request(choice.plugins, environment, device.type, mixed_precision, dynamo)
    _check_strategy(choice, request, found)
    if sizes is not None and dims.cp > 1:
        found += sequence_problems(sizes, device.type, is_compiling(dynamo))
    rng_types = usable_rng_types(arguments.rng_types, device.type, found)
    init = _handler(handlers, InitProcessGroupKwargs)
    backend = _backend(init, device.type, environment, choice, found)
    found.raise_if()
    several = environment.world_size > 1
    rank = environment.rank or 0 if several else 0
    return Plan(
        device_type=device.type,
        device=device,
        rank=rank,
        local_rank=environment.local_rank or 0 if several else 0,
        world_size=environment.world_size,
        local_world_size=environment.local_world_size or environment.world_size,
        backend=backend,
        strategy=choice.label,
        spec=choice.spec,
        plugins=choice.plugins,
        parallel_dims=dataclasses.replace(dims, rank=rank),
        parallelism=sizes,
        distributed_type=_distributed_type(choice, environment.world_size, device.type),
        mixed_precision=mixed_precision,
        fp8=fp8,
        autocast=_handler(handlers, AutocastKwargs),
        scaler=_handler(handlers, GradScalerKwargs),
        ddp=_handler(handlers, DistributedDataParallelKwargs),
        init=init,
        profile=_handler(handlers, ProfileKwargs),
        dataloader=dataloader,
        accumulation=accumulation,
        project=project,
        dynamo=dynamo,
        device_placement=arguments.device_placement,
        step_scheduler_with_optimizer=arguments.step_scheduler_with_optimizer,
        rng_types=rng_types,
        debug=environment.debug,
        given_handlers=frozenset(handlers),
        notes=(
            *choice.spec.notes(request),
            *_unread(choice, handlers.values()),
            *_kept(arguments, accumulation),
        ),
        environment=environment,
    )


def _check_strategy(choice: Choice, request: Request, found: Problems) -> None:
    """Note what the strategies that are on cannot do."""
    for spec in specs():
        if spec is choice.spec or spec.leading(choice.plugins) is not None:
            found += spec.problems(request)


def _unread(choice: Choice, handlers: Iterable[KwargsHandler]) -> list[str]:
    """Return notes of handlers that another strategy reads; libraries pass them to each."""
    reserved = tuple(kind for spec in specs() for kind in spec.handlers)
    notes = []
    for handler in handlers:
        given = ", ".join(f"{key}={value!r}" for key, value in handler.to_kwargs().items())
        unread = isinstance(handler, reserved) and not isinstance(handler, choice.spec.handlers)
        if given and unread:
            name = type(handler).__name__
            rule = f"{choice.label} distributes the model: nothing reads {name}"
            notes.append(f"{name}({given}) with {choice.label}: {rule}.")
    return notes


def _check_world(environment: Environment, found: Problems) -> None:
    size = environment.world_size
    if size < 1:
        found.add(f"WORLD_SIZE={size}", "it is at least 1", "Unset it for one process.")
    if environment.unusable is not None:
        found.append(environment.unusable)
    if size <= 1:
        return
    for name in ("rank", "local_rank"):
        index = getattr(environment, name)
        limit = size if name == "rank" else environment.local_world_size or size
        if index is None:
            found.add(
                f"{name.upper()} is not set",
                f"WORLD_SIZE={size} processes need to know which one each is",
                "Start with torchrun, or set RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.",
            )
        elif not 0 <= index < limit:
            found.add(
                f"{name.upper()}={index}",
                f"it is from 0 to {limit - 1}",
                "Give each process an index of its own.",
            )


def _handlers(
    given: Iterable[KwargsHandler], found: Problems
) -> dict[type[KwargsHandler], KwargsHandler]:
    handlers: dict[type[KwargsHandler], KwargsHandler] = {}
    names = [kind.__name__ for kind in HANDLERS]
    for handler in given:
        kind = next((k for k in HANDLERS if isinstance(handler, k)), None)
        if kind is None:
            found.add(
                f"kwargs_handlers: {handler!r}",
                f"each is one of {', '.join(names)}",
                nearest(type(handler).__name__, names),
            )
        elif kind in handlers:
            found.add(
                f"kwargs_handlers: two {kind.__name__}",
                "there is one handler of a kind",
                "Put all values into one.",
            )
        else:
            handlers[kind] = handler
    return handlers


def _handler(handlers: dict[type[KwargsHandler], KwargsHandler], kind: type[Handler]) -> Handler:
    given = handlers.get(kind)
    return given if isinstance(given, kind) else kind()


def _device(arguments: Arguments, environment: Environment, found: Problems) -> torch.device:
    forced = "cpu=True" if arguments.cpu else "ACCELERATE_USE_CPU" if environment.use_cpu else None
    asked = arguments.device
    if asked is None and not forced:
        asked = environment.torch_device
    if forced and asked not in (None, "auto", "cpu"):
        found.add(
            f"device={asked!r} with {forced}",
            "both choose the device, and they disagree",
            "Give one of them.",
        )
    try:
        several = environment.world_size > 1
        local_rank = (environment.local_rank or 0) if several else 0
        device = resolve_device("cpu" if forced else asked, local_rank, environment.own_devices)
    except ConfigError as error:
        found.take(error)
        return torch.device("cpu")
    if several and device.type == "mps":
        found.add(
            f"{environment.world_size} processes on mps",
            "Apple's GPU serves one process",
            "Start one process, or use cpu=True.",
        )
    return device


def _mixed_precision(
    arguments: Arguments,
    environment: Environment,
    handlers: dict[type[KwargsHandler], KwargsHandler],
    choice: Choice,
    device: torch.device,
    found: Problems,
) -> tuple[str, Float8]:
    given, source = arguments.mixed_precision, "mixed_precision"
    if given is None and environment.mixed_precision is not None:
        given, source = environment.mixed_precision, "ACCELERATE_MIXED_PRECISION"
    requested = None if given is None else str(given or "no").lower()
    name = choice.spec.precision(choice.plugins, requested) or "no"
    if name not in PrecisionType.list():
        found.append(unknown_choice(source, name, PrecisionType.list()))
    recipes = [recipe for kind, recipe in handlers.items() if kind in RECIPES]
    fp8 = resolve_fp8(recipes, name, source, device.type, environment.variables, found)
    return name, fp8


def _dataloader(arguments: Arguments, found: Problems) -> DataLoaderConfiguration:
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    older = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    config = arguments.dataloader_config
    if config is None:
        return DataLoaderConfiguration(**older)
    for name, value in older.items():
        if getattr(config, name) != value:
            found.add(
                f"{name}={value!r} with dataloader_config.{name}={getattr(config, name)!r}",
                "given in two places with different values",
                f"Give {name} in DataLoaderConfiguration alone.",
            )
    return config


def _accumulation(
    arguments: Arguments, environment: Environment, choice: Choice, found: Problems
) -> GradientAccumulationPlugin:
    steps, source = arguments.gradient_accumulation_steps, "gradient_accumulation_steps"
    plugin = arguments.gradient_accumulation_plugin
    owned = plugin is not None and plugin.num_steps is not None
    if owned and plugin is not None and steps not in (1, plugin.num_steps):
        found.add(
            f"{source}={steps} with gradient_accumulation_plugin.num_steps={plugin.num_steps}",
            "given in two places with different values",
            "Give num_steps in GradientAccumulationPlugin alone.",
        )
    implied = choice.spec.accumulation_steps(choice.plugins)
    if owned and plugin is not None:  # a single micro-batch, where the caller accumulates itself
        alone = plugin.num_steps == 1
        return dataclasses.replace(plugin, num_steps=(alone and implied) or plugin.num_steps)
    kept = arguments.accumulation
    silent = plugin is None and steps is ONE_BY_DEFAULT and environment.accumulation_steps is None
    if kept is not None and silent and implied is None:
        return kept
    if steps == 1 and environment.accumulation_steps is not None:
        steps, source = environment.accumulation_steps, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if steps == 1:
        steps = implied or steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        number = isinstance(steps, str) and steps.isdecimal()
        remedy = f"Give int({source})." if number else "Give 1 or more."
        found.add(f"{source}={steps!r}", "it is a whole number, at least 1", remedy)
        steps = 1
    return dataclasses.replace(plugin or GradientAccumulationPlugin(), num_steps=int(steps))


def _kept(arguments: Arguments, accumulation: GradientAccumulationPlugin) -> list[str]:
    """Return a note of micro-batches that an earlier run of the process has settled."""
    if accumulation is not arguments.accumulation or accumulation.num_steps == 1:
        return []
    return [
        f"This Accelerator keeps gradient_accumulation_steps={accumulation.num_steps}, which an "
        "earlier one of this process set: they share it. Give gradient_accumulation_steps to "
        "change it."
    ]


def _project(arguments: Arguments, found: Problems) -> ProjectConfiguration:
    given = {
        name: os.fspath(value)
        for name in ("project_dir", "logging_dir")
        if (value := getattr(arguments, name)) is not None
    }
    config = arguments.project_config
    if config is None:
        return ProjectConfiguration(**given)
    for name, value in given.items():
        if getattr(config, name) not in (None, value):
            found.add(
                f"{name}={value!r} with project_config.{name}={getattr(config, name)!r}",
                "given in two places with different values",
                f"Give {name} in ProjectConfiguration alone.",
            )
    lacking = {name: value for name, value in given.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **lacking) if lacking else config


def _dynamo(arguments: Arguments, found: Problems) -> TorchDynamoPlugin:
    plugin, backend = arguments.dynamo_plugin, arguments.dynamo_backend
    if plugin is not None and backend is not None:
        found.add(
            f"dynamo_backend={str(backend)!r} with dynamo_plugin",
            "given in two places with different values",
            "Give the backend in TorchDynamoPlugin alone.",
        )
    return plugin or TorchDynamoPlugin(backend=backend)


def usable_rng_types(
    given: Sequence[str | RNGType] | None, device_type: str, found: Problems
) -> tuple[str, ...]:
    """Return the names of generators to synchronise; None: of loaders' own. Note unknown ones."""
    names = tuple(str(name) for name in (("generator",) if given is None else given))
    usable = {"torch", "generator", device_type} & set(RNGType.list())
    for name in names:
        if name not in RNGType.list():
            known = RNGType.list()
            found.add(
                f"rng_types: {name!r}", f"each is one of {', '.join(known)}", nearest(name, known)
            )
        elif name not in usable:
            found.add(
                f"rng_types: {name!r}",
                f"this run computes on {device_type}",
                f"Name some of {', '.join(sorted(usable))}.",
            )
    return names


def _backend(
    init: InitProcessGroupKwargs,
    device_type: str,
    environment: Environment,
    choice: Choice,
    found: Problems,
) -> str | None:
    several = environment.world_size > 1
    if not (several or environment.has_rendezvous or choice.plugins):
        return None
    nowhere = None in (environment.master_addr, environment.master_port)
    if several and init.init_method is None and nowhere:
        found.add(
            "MASTER_ADDR or MASTER_PORT is not set",
            "processes need a place to meet",
            "Start with torchrun, or give InitProcessGroupKwargs(init_method=…).",
        )
    if init.backend in (None, InitProcessGroupKwargs().backend):
        return process_group_backend(device_type)
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    asked = [part.rpartition(":")[2] for part in str(init.backend).split(",")]
    for name in asked:
        if name not in known:
            found.append(unknown_choice("InitProcessGroupKwargs.backend", name, known))
    return init.backend


def _distributed_type(choice: Choice, world_size: int, device_type: str) -> DistributedType:
    leading = choice.spec.leading(choice.plugins)
    reported = choice.spec.reported if leading is None else leading.reported
    if reported is not None:
        return reported
    if world_size == 1:
        return DistributedType.NO
    special = DISTRIBUTED_TYPES.get(device_type)
    return special or DistributedType(f"MULTI_{device_type.upper()}")
