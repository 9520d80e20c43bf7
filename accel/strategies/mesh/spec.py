"""The spec of the mesh: FSDP and tensor parallelism, each a dimension of one `DeviceMesh`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from accel.config.fsdp import PREFIX, VARIABLES, FullyShardedDataParallelPlugin, from_variables
from accel.config.parallelism import RING, ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import is_compiling
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem
from accel.plan.dims import ParallelDims
from accel.strategies.spec import (
    MemoryLayout,
    Plugins,
    PluginSpec,
    Request,
    StrategySpec,
    require_kind,
)

FSDP, TENSOR_PARALLEL, PIPELINE = "fsdp", "tensor_parallel", "pipeline"


def _read(given: object, variables: Mapping[str, str]) -> FullyShardedDataParallelPlugin:
    """Return the FSDP plugin, with the fields that it leaves open from the environment."""
    kind = FullyShardedDataParallelPlugin
    if given is None:
        return kind(**from_variables({n.removeprefix(PREFIX): v for n, v in variables.items()}))
    plugin = require_kind("fsdp_plugin", given, kind)
    lacking = plugin.lacking(variables)
    return plugin.with_given(**lacking) if lacking else plugin


def _sized_shards(
    plugin: FullyShardedDataParallelPlugin | None, sizes: ParallelismConfig
) -> FullyShardedDataParallelPlugin | None:
    """Return the FSDP plugin with so many replicas; shards switch it on."""
    if plugin is None:
        if not (sizes.dp_shard_enabled or sizes.cp_enabled):
            return None
        plugin = FullyShardedDataParallelPlugin()
    given, wanted = plugin.dp_replicate_size, sizes.dp_replicate_size
    if isinstance(given, int) and given != wanted:
        raise ConfigError.of(
            f"ParallelismConfig.dp_replicate_size={wanted} with "
            f"FullyShardedDataParallelPlugin.dp_replicate_size={given}",
            "given in two places with different values",
            "Give it in ParallelismConfig alone.",
        )
    return dataclasses.replace(plugin, dp_replicate_size=wanted)


def _sized_tensor_parallel(
    plugin: TorchTensorParallelPlugin | None, sizes: ParallelismConfig
) -> TorchTensorParallelPlugin | None:
    """Return the plugin of tensor parallelism with so many ranks; a size above 1 switches it on."""
    if plugin is None:
        return TorchTensorParallelPlugin(tp_size=sizes.tp_size) if sizes.tp_enabled else None
    if plugin.tp_size not in (1, sizes.tp_size):
        raise ConfigError.of(
            f"ParallelismConfig.tp_size={sizes.tp_size} with "
            f"TorchTensorParallelPlugin.tp_size={plugin.tp_size}",
            "given in two places with different values",
            "Give it in ParallelismConfig alone.",
        )
    return dataclasses.replace(plugin, tp_size=sizes.tp_size)


def dims(plugins: Plugins, environment: Environment, sizes: ParallelismConfig) -> ParallelDims:
    """Return the parallel dimensions: replicas × shards × context- and tensor-parallel ranks.

    Raise `ConfigError` if numbers of replicas and shards do not divide the processes.
    """
    world_size = environment.world_size
    parallel: TorchTensorParallelPlugin | None = plugins.get(TENSOR_PARALLEL)
    tp = 1 if parallel is None else parallel.tp_size
    cp, pp = sizes.cp_size, sizes.pp_size
    model = tp * cp * pp
    if world_size % model and model > tp:
        raise ConfigError.of(
            f"ParallelismConfig(pp_size={pp}, cp_size={cp}, tp_size={tp}) with "
            f"{_counted(world_size)}",
            "each replica of the model takes as many processes as their product",
            f"Start a multiple of {model} processes, or choose other sizes.",
        )
    if world_size % tp:
        raise ConfigError.of(
            f"TorchTensorParallelPlugin.tp_size={tp} with {_counted(world_size)}",
            "each replica of the model takes as many processes",
            f"Start a multiple of {tp} processes, or choose another tp_size.",
        )
    data = replicate = world_size // model
    fsdp: FullyShardedDataParallelPlugin | None = plugins.get(FSDP)
    if fsdp is not None:
        nodes = world_size // (environment.local_world_size or world_size)
        replicate = num_replicas(fsdp.dp_replicate_size, data, nodes)
        ConfigError.raise_if(_shard_problems(fsdp, data, replicate, cp))
    return ParallelDims(dp_replicate=replicate, dp_shard=data // replicate, cp=cp, tp=tp, pp=pp)


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _shard_problems(
    plugin: FullyShardedDataParallelPlugin, data: int, replicas: int, cp: int
) -> list[Problem]:
    """Return the problems of replicas and groups that do not divide the data-parallel ranks."""
    where = type(plugin).__name__
    if data % replicas:
        value = f"{where}.dp_replicate_size={plugin.dp_replicate_size!r} with {data} processes"
        rule = "each replica of the model takes as many processes"
        return [Problem(f"{value} for data", rule, "Choose a number that divides them.")]
    group, shards = plugin.reshard_after_forward, data // replicas * cp
    is_size = isinstance(group, int) and not isinstance(group, bool)
    if is_size and (not 1 < group < shards or shards % group):
        rule = f"as a number, it divides the {shards} shards and is neither 1 nor all of them"
        value = f"{where}.reshard_after_forward={group}"
        return [Problem(value, rule, "Give True or False.")]
    return []


def num_replicas(wanted: int | str | None, data: int, nodes: int) -> int:
    """Return how many replicas a sharded model has: a number, "nodes", "all", or None for 1."""
    if wanted == "nodes":
        return nodes
    return data if wanted == "all" else int(wanted or 1)


def _precision(plugins: Plugins, given: str | None) -> str | None:
    """Return the half precision that FSDP's policy names, where the run requests none."""
    policy = _policy(plugins)
    return policy if given in (None, "no") and policy in ("bf16", "fp16") else given


def _policy(plugins: Plugins) -> str | None:
    plugin: FullyShardedDataParallelPlugin | None = plugins.get(FSDP)
    return None if plugin is None else plugin.policy_format


def _rank0_init(plugins: Plugins) -> str:
    plugin: FullyShardedDataParallelPlugin | None = plugins.get(FSDP)
    on = plugin is not None and plugin.cpu_ram_efficient_loading
    return f"{type(plugin).__name__}.cpu_ram_efficient_loading=True" if on else ""


def _problems(request: Request) -> list[Problem]:
    policy, precision = _policy(request.plugins), request.mixed_precision
    if precision == "fp8" and TENSOR_PARALLEL in request.plugins:
        value = "mixed_precision='fp8' with tensor parallelism"
        rule = "matrix products in fp8 are not built for weights that are sharded by tp_plan"
        return [Problem(value, rule, "Use bf16, or FSDP alone.")]
    if PIPELINE in request.plugins and (problems := _pipeline_problems(request)):
        return problems
    computes = "bf16" if precision == "fp8" else precision  # where layers are not converted
    if policy is None or computes not in ("bf16", "fp16") or policy == computes:
        return []
    given = request.plugins[FSDP].mixed_precision_policy
    return [
        Problem(
            f"mixed_precision={precision!r} with mixed_precision_policy={given!r}",
            "both name the format of computation, and they disagree",
            "Give one of them.",
        )
    ]


def _pipeline_problems(request: Request) -> list[Problem]:
    """Return what stages of a pipeline do not compose with."""
    sizes: ParallelismConfig = request.plugins[PIPELINE]
    fsdp: FullyShardedDataParallelPlugin | None = request.plugins.get(FSDP)
    refused = {
        "mixed_precision='fp8'": request.mixed_precision == "fp8",
        f"cp_backend={RING!r}": sizes.cp_enabled and sizes.cp_backend == RING,
        "torch.compile": is_compiling(request.dynamo),
        f"tp_size={sizes.tp_size} and pp_schedule={sizes.pp_schedule}": (
            sizes.tp_enabled and "ZeroBubble" in str(sizes.pp_schedule)
        ),
        "cpu_offload": fsdp is not None and bool(fsdp.cpu_offload),
        "ignored_modules": fsdp is not None and fsdp.ignored_modules is not None,
    }
    rule = "not built for stages of a pipeline"
    return [
        Problem(f"pp_size={sizes.pp_size} with {value}", rule, "Leave one of them out.")
        for value, wrong in refused.items()
        if wrong
    ]


SPEC = StrategySpec(
    name="mesh",
    place="accel.strategies.mesh.strategy:MeshStrategy",
    plugins=(
        PluginSpec(
            name=FSDP,
            kind=FullyShardedDataParallelPlugin,
            reported=DistributedType.FSDP,
            argument="fsdp_plugin",
            switch="ACCELERATE_USE_FSDP",
            prefixes=(PREFIX,),
            read=_read,
            callables=("auto_wrap_policy", "param_init_fn"),
            sized=_sized_shards,
            launch_variables={
                **{f"fsdp_{name.lower()}": PREFIX + name for name in VARIABLES},
                "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
                "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
            },
        ),
        PluginSpec(
            name=TENSOR_PARALLEL,
            kind=TorchTensorParallelPlugin,
            label="tp",
            reported=DistributedType.TP,
            argument="torch_tp_plugin",
            sized=_sized_tensor_parallel,
        ),
        PluginSpec(
            name=PIPELINE,
            kind=None,
            label="pp",
            sized=lambda given, sizes: sizes if sizes.pp_enabled else None,
        ),
    ),
    owns_precision=True,
    hooks_inside=True,
    clips_value=False,
    dims=dims,
    precision=_precision,
    rank0_init=_rank0_init,
    memory=(MemoryLayout(FSDP, frozenset({"parameters", "gradients", "optimizer"})),),
    problems=_problems,
)
