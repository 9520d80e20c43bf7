"""Which strategy distributes the model, as arguments or environment switch it on.

None on means DistributedDataParallel, or one process alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin, from_variables
from accel.config.handlers import DistributedDataParallelKwargs, KwargsHandler
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.enums import DistributedType
from accel.env import Environment
from accel.errors import ConfigError, NotBuiltError, Problem
from accel.parallel import ParallelDims

if TYPE_CHECKING:
    from accel.planning.arguments import Arguments

# What is reported of a run under each strategy; the others report their kind of device.
REPORTED = {
    "fsdp": DistributedType.FSDP,
    "tp": DistributedType.TP,
    "deepspeed": DistributedType.DEEPSPEED,
}
# Fields of the FSDP plugin that say one thing together.
TOGETHER_IN_PLUGIN = (
    ("sharding_strategy", "reshard_after_forward", "dp_replicate_size"),
    ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"),
)
# Engines that share one model between them.
TOGETHER = {frozenset({"fsdp", "tp"})}


@dataclass
class Findings:
    """What is wrong, and what is merely not there yet."""

    wrong: list[Problem] = field(default_factory=list)
    not_built: list[Problem] = field(default_factory=list)

    def add(self, value: str, rule: str, remedy: str) -> None:
        """Note a mistake."""
        self.wrong.append(Problem(value, rule, remedy))

    def missing(self, value: str, remedy: str) -> None:
        """Note something that this version does not offer."""
        self.not_built.append(Problem(value, "this version does not offer it yet", remedy))

    def raise_if_any(self) -> None:
        """Raise what was noted, all of it."""
        if self.wrong:
            raise ConfigError(*self.wrong, *self.not_built)
        if self.not_built:
            raise NotBuiltError(*self.not_built)


@dataclass(frozen=True)
class Engines:
    """The plugins of the strategy that distributes the model.

    Attributes:
        fsdp: fully sharded training.
        tensor_parallel: split matrices; alone, or together with `fsdp`.
        deepspeed: DeepSpeed's plugins by name; the first is the active one.
    """

    fsdp: FullyShardedDataParallelPlugin | None = None
    tensor_parallel: TorchTensorParallelPlugin | None = None
    deepspeed: Mapping[str, DeepSpeedPlugin] | None = None

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's active plugin, None where it is off."""
        plugins = (self.deepspeed or {}).values()
        return next((p for p in plugins if isinstance(p, DeepSpeedPlugin) and p.selected), None)

    @property
    def accumulation_steps(self) -> int | None:
        """The micro-batches per optimizer step that the engine's own configuration tells."""
        told = self._told("gradient_accumulation_steps")
        return told if isinstance(told, int) else None

    @property
    def mixed_precision(self) -> str | None:
        """The precision that the engine's own configuration tells."""
        for name in ("bf16", "fp16"):
            if self._told(f"{name}.enabled") is True:
                return name
        return None

    def _told(self, key: str) -> Any:
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.get_value(key)

    @property
    def policy_precision(self) -> str | None:
        """The half precision that FSDP's policy names, if any; it goes before the run's "no"."""
        named = None if self.fsdp is None else self.fsdp.policy_format
        return named if named in ("bf16", "fp16") else None

    @property
    def strategy(self) -> str | None:
        """The key in the strategy table, None where no engine is on."""
        for name, plugin in (
            ("deepspeed", self.deepspeed),
            ("fsdp", self.fsdp),
            ("tp", self.tensor_parallel),
        ):
            if plugin is not None:
                return name
        return None


def choose(arguments: Arguments, environment: Environment, found: Findings) -> Engines:
    """Return the engine that is switched on.

    Args:
        arguments: what the caller asks for.
        environment: what the launcher set; an argument goes before it.
        found: takes what is wrong: two engines on, a plugin of another kind.
    """
    if arguments.megatron_lm_plugin is not None or "megatron_lm" in environment.engines:
        found.missing("megatron_lm_plugin", "Leave it out: the model is then replicated by DDP.")
    engines = Engines(
        fsdp=_fsdp(arguments, environment, found),
        tensor_parallel=_tensor_parallel(arguments, environment, found),
        deepspeed=_deepspeed(arguments, environment, found),
    )
    on = {"fsdp": engines.fsdp, "deepspeed": engines.deepspeed, "tp": engines.tensor_parallel}
    names = [name for name, plugin in on.items() if plugin is not None]
    for pair in itertools.combinations(names, 2):
        if frozenset(pair) not in TOGETHER:
            found.add(
                f"{pair[0]} with {pair[1]}",
                "they cannot be combined",
                f"Switch {pair[0]} or {pair[1]} off.",
            )
    return engines


def check_precision(
    engines: Engines, mixed_precision: str, device_type: str, found: Findings
) -> None:
    """Note a precision that the engine cannot compute in on this device, or does not compute in."""
    if engines.deepspeed is not None and mixed_precision == "fp16" and device_type == "cpu":
        found.add(
            "mixed_precision='fp16' under DeepSpeed on a CPU",
            "DeepSpeed computes in fp16 on accelerators alone",
            "Use mixed_precision='bf16' or 'no'.",
        )
    policy = None if engines.fsdp is None else engines.fsdp.policy_format
    if policy is not None and mixed_precision in ("bf16", "fp16") and policy != mixed_precision:
        given = getattr(engines.fsdp, "mixed_precision_policy", None)
        found.add(
            f"mixed_precision={mixed_precision!r} with mixed_precision_policy={given!r}",
            "both name the format of computation, and they disagree",
            "Give one of them.",
        )


def check_handlers(
    engines: Engines,
    handlers: Iterable[KwargsHandler],
    found: Findings,
) -> None:
    """Note handlers of what the engine does in ways of its own.

    Args:
        engines: at most one of them is on.
        handlers: as given.
        found: takes what is wrong.
    """
    name = engines.strategy
    for handler in handlers:
        told = ", ".join(f"{key}={value!r}" for key, value in handler.to_kwargs().items())
        if not told or name is None:
            continue
        if isinstance(handler, DistributedDataParallelKwargs):
            rule = f"{name} distributes the model: none is wrapped in DistributedDataParallel"
            found.add(f"{type(handler).__name__}({told}) with {name}", rule, "Leave it out.")


def check_shards(engines: Engines, environment: Environment, found: Findings) -> None:
    """Note numbers of replicas and shards that do not divide the processes."""
    if engines.fsdp is None:
        return
    size = 1 if engines.tensor_parallel is None else engines.tensor_parallel.tp_size
    data, rest = divmod(environment.world_size, size)
    nodes = environment.world_size // (environment.local_world_size or environment.world_size)
    wanted, group = engines.fsdp.dp_replicate_size, engines.fsdp.reshard_after_forward
    replicas = num_replicas(wanted, data, nodes)
    if rest:
        return  # noted with the plugin of tensor parallelism
    if data % replicas:
        found.add(
            f"dp_replicate_size={wanted!r} with {data} processes for data",
            "each replica of the model takes as many processes",
            "Choose a number that divides them.",
        )
        return
    shards = data // replicas
    is_size = isinstance(group, int) and not isinstance(group, bool)
    if is_size and (not 1 < group < shards or shards % group):
        found.add(
            f"reshard_after_forward={group}",
            f"as a number, it divides the {shards} shards and is neither 1 nor all of them",
            "Give True or False.",
        )


def dims(engines: Engines, environment: Environment) -> ParallelDims:
    """Return the parallel dimensions of a request in which nothing is wrong."""
    world_size = environment.world_size
    rank = (environment.rank or 0) if world_size > 1 else 0
    tp = 1 if engines.tensor_parallel is None else engines.tensor_parallel.tp_size
    data = world_size // tp
    replicate = 1 if engines.deepspeed is not None else data
    if engines.fsdp is not None:
        nodes = world_size // (environment.local_world_size or world_size)
        replicate = num_replicas(engines.fsdp.dp_replicate_size, data, nodes)
    return ParallelDims(dp_replicate=replicate, dp_shard=data // replicate, tp=tp, rank=rank)


def num_replicas(wanted: int | str | None, data: int, nodes: int) -> int:
    """Return how many replicas of a sharded model there are.

    Args:
        wanted: a number, "nodes", "all", or None for 1.
        data: processes, not counting those that split one replica's matrices.
        nodes: number of machines.
    """
    if wanted == "nodes":
        return nodes
    return data if wanted == "all" else int(wanted or 1)


def _fsdp(
    arguments: Arguments, environment: Environment, found: Findings
) -> FullyShardedDataParallelPlugin | None:
    plugin = arguments.fsdp_plugin
    if plugin is None and "fsdp" not in environment.engines:
        return None
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        _refuse_kind("fsdp_plugin", plugin, FullyShardedDataParallelPlugin, found)
        return None
    try:
        return _filled(plugin, from_variables(dict(environment.fsdp)))
    except NotBuiltError as error:
        found.not_built += error.problems
    except ConfigError as error:
        found.wrong += error.problems
    return plugin


def _filled(
    plugin: FullyShardedDataParallelPlugin | None, variables: dict[str, Any]
) -> FullyShardedDataParallelPlugin:
    """Return the plugin with what it leaves open from the environment.

    A field that says how parameters are sharded or wrapped settles its whole group.
    """
    if plugin is None:
        return FullyShardedDataParallelPlugin(**variables)
    for group in TOGETHER_IN_PLUGIN:
        if any(getattr(plugin, name) is not None for name in group):
            variables = {k: v for k, v in variables.items() if k not in group}
    lacking = {k: v for k, v in variables.items() if getattr(plugin, k) is None}
    return dataclasses.replace(plugin, **lacking) if lacking else plugin


def _tensor_parallel(
    arguments: Arguments, environment: Environment, found: Findings
) -> TorchTensorParallelPlugin | None:
    plugin = arguments.torch_tp_plugin
    if plugin is not None and not isinstance(plugin, TorchTensorParallelPlugin):
        _refuse_kind("torch_tp_plugin", plugin, TorchTensorParallelPlugin, found)
        return None
    if plugin is not None and environment.world_size % plugin.tp_size:
        found.add(
            f"tp_size={plugin.tp_size} with {environment.world_size} processes",
            "each replica of the model takes as many processes",
            "Choose a tp_size that divides the number of processes.",
        )
    return plugin


def _deepspeed(
    arguments: Arguments, environment: Environment, found: Findings
) -> Mapping[str, DeepSpeedPlugin] | None:
    given = arguments.deepspeed_plugin
    if given is not None and arguments.deepspeed_plugins is not None:
        found.add(
            "deepspeed_plugin with deepspeed_plugins",
            "they are two spellings of one argument",
            "Give deepspeed_plugins alone.",
        )
    given = arguments.deepspeed_plugins if given is None else given
    if given is None and "deepspeed" not in environment.engines:
        return None
    given = DeepSpeedPlugin() if given is None else given
    named = dict(given) if isinstance(given, Mapping) else {"default": given}
    for name, plugin in named.items():
        if not isinstance(plugin, DeepSpeedPlugin):
            _refuse_kind(f"deepspeed_plugins[{name!r}]", plugin, DeepSpeedPlugin, found)
    if not named:
        found.add("deepspeed_plugins={}", "there is one plugin at least", "Give one, or None.")
    if not named or any(not isinstance(plugin, DeepSpeedPlugin) for plugin in named.values()):
        return named
    return _joined(named, environment, found)


def _joined(
    named: dict[str, DeepSpeedPlugin], environment: Environment, found: Findings
) -> Mapping[str, DeepSpeedPlugin] | None:
    """Fill plugins from the environment and see that one of them is selected."""
    plugins = list(named.values())
    for plugin in plugins:
        found.wrong += plugin.fill(environment.deepspeed)
        plugin.join(plugins)
        if plugin.enable_msamp:
            found.missing("DeepSpeedPlugin(enable_msamp=True)", "Use mixed_precision='bf16'.")
        try:
            plugin.given_config()
        except ConfigError as error:
            found.wrong += error.problems
            return None
    if not any(plugin.selected for plugin in plugins):
        plugins[0].select()
    return named


def _refuse_kind(name: str, value: Any, kind: type, found: Findings) -> None:
    found.add(f"{name}={value!r}", f"it is a {kind.__name__}", f"Give {name}={kind.__name__}(…).")
