"""The spec of Megatron-LM. Its ranks: tensor parallel fastest, then data, then pipeline stages."""

from __future__ import annotations

import copy

from accel.config.megatron import CALLABLES, PREFIX, VARIABLES, MegatronLMPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.training import is_compiling
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem, Problems
from accel.machine.imports import is_available
from accel.plan.dims import ParallelDims
from accel.strategies.spec import Decided, Plugins, PluginSpec, Request, StrategySpec

NAME = "megatron"
DEVICE = "cuda"  # which megatron-core's code names


def _adopt(plugin: MegatronLMPlugin, decided: Decided) -> MegatronLMPlugin:
    """Return a copy of a plugin that accumulates as the run does."""
    plugin = copy.copy(plugin)
    if "accumulation_steps" in decided:
        steps, source = decided["accumulation_steps"]
        set_micro_batches(plugin, int(str(steps)), source)
    return plugin


def set_micro_batches(plugin: MegatronLMPlugin, steps: int, source: str) -> None:
    """Set the micro-batches of a step; raise `ConfigError` if a plugin gives another number."""
    if plugin.num_micro_batches not in (1, steps):
        raise ConfigError.of(
            f"{source}={steps} with MegatronLMPlugin.num_micro_batches={plugin.num_micro_batches}",
            "given in two places with different values",
            "Leave num_micro_batches out.",
        )
    plugin.num_micro_batches = steps


def dims(plugins: Plugins, environment: Environment, sizes: ParallelismConfig) -> ParallelDims:
    """Return the parallel dimensions in Megatron's order of ranks.

    Raise `ConfigError` if tp_degree × pp_degree does not divide the processes.

    Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/parallel_state
    """
    plugin: MegatronLMPlugin = plugins[NAME]
    world_size, model_size = environment.world_size, plugin.model_size
    if world_size % model_size:
        raise ConfigError.of(
            f"MegatronLMPlugin(tp_degree={plugin.tp_degree}, pp_degree={plugin.pp_degree}) with "
            f"{world_size} processes",
            f"each replica of the model takes {model_size} processes",
            f"Start a multiple of {model_size} processes.",
        )
    data = world_size // model_size
    shard = plugin.use_distributed_optimizer
    return ParallelDims(
        pp=plugin.sizes[1],
        dp_replicate=1 if shard else data,
        dp_shard=data if shard else 1,
        tp=plugin.sizes[0],
        order=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )


def _accumulation_steps(plugins: Plugins) -> int | None:
    steps = plugins[NAME].num_micro_batches
    return int(steps) if steps > 1 else None


def _problems(request: Request) -> list[Problem]:
    problems = Problems()
    if request.mixed_precision == "fp8":
        rule = "megatron-core's layers compute in bf16, fp16 or fp32 here"
        problems.add("mixed_precision='fp8' under Megatron", rule, "Use mixed_precision='bf16'.")
    if is_compiling(request.dynamo):
        rule = "its schedules call modules that torch.compile does not wrap here"
        problems.add("torch.compile under Megatron", rule, "Switch compilation off.")
    if request.device_type != DEVICE:
        rule = "megatron-core computes on CUDA GPUs"
        remedy = "Start on a machine with GPUs, or use FSDP or tensor parallelism."
        problems.add(f"MegatronLMPlugin on {request.device_type}", rule, remedy)
    if not is_available("megatron.core"):
        rule = "the package megatron-core is not installed"
        problems.add("MegatronLMPlugin", rule, "pip install 'accel-runner[megatron]'")
    return problems


SPEC = StrategySpec(
    name=NAME,
    place="accel.strategies.megatron.strategy:MegatronStrategy",
    plugins=(
        PluginSpec(
            name=NAME,
            kind=MegatronLMPlugin,
            reported=DistributedType.MEGATRON_LM,
            argument="megatron_lm_plugin",
            switch="ACCELERATE_USE_MEGATRON_LM",
            prefixes=(PREFIX,),
            adopt=_adopt,
            callables=CALLABLES,
            launch_variables={f"megatron_lm_{name}": PREFIX + name.upper() for name in VARIABLES},
        ),
    ),
    owns_precision=True,
    owns_parameters=True,
    clips_value=False,
    packages=("megatron-core",),
    dims=dims,
    accumulation_steps=_accumulation_steps,
    problems=_problems,
)
