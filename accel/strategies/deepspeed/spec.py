"""The spec of DeepSpeed: its plugins by name, of which one is active."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from accel.config.deepspeed import (
    PREFIXES,
    VARIABLES,
    Claims,
    DeepSpeedPlugin,
    active,
    share_selection,
)
from accel.config.deepspeed_json import Config, value_at
from accel.config.parallelism import ParallelismConfig
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem, Problems
from accel.plan.dims import ParallelDims
from accel.strategies.spec import (
    Decided,
    MemoryLayout,
    Plugins,
    PluginSpec,
    Request,
    StrategySpec,
    require_kind,
)

NAME = "deepspeed"
# Settings of `accel launch`: fields of the plugin, of which two have names of their own there.
LAUNCH_VARIABLES = {
    {
        "hf_ds_config": "deepspeed_config_file",
        "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
    }.get(field, field): variable
    for variable, field in VARIABLES.items()
}
_PER_MACHINE = "Start `accel launch` on each machine that is wanted, with its --machine_rank."
NOT_LAUNCHED = {
    "deepspeed_hostfile": _PER_MACHINE,
    "deepspeed_inclusion_filter": _PER_MACHINE,
    "deepspeed_exclusion_filter": _PER_MACHINE,
    "deepspeed_multinode_launcher": "",
}
# Where DeepSpeed's configuration has what a run decides.
DECIDED = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
    "clip_grad_norm": "gradient_clipping",
}


def _read(given: object, variables: Mapping[str, str]) -> Mapping[str, DeepSpeedPlugin]:
    """Return the plugins by name, filled from the environment; one of them is selected."""
    given = DeepSpeedPlugin() if given is None else given
    by_name = given if isinstance(given, Mapping) else {"default": given}
    named: dict[str, DeepSpeedPlugin] = {}
    found = Problems()
    if not by_name:
        found.add("deepspeed_plugins={}", "there is one plugin at least", "Give one, or None.")
    for name, value in by_name.items():
        try:
            named[name] = require_kind(f"deepspeed_plugins[{name!r}]", value, DeepSpeedPlugin)
        except ConfigError as error:
            found.take(error)
    found.raise_if()
    for plugin in named.values():
        found += plugin.fill(variables)
        if plugin.enable_msamp:
            found.add_not_built("DeepSpeedPlugin(enable_msamp=True)", "Use mixed_precision='bf16'.")
        found.collect(plugin.check_config)
    found.raise_if()
    share_selection(list(named.values()))
    return named


def _adopt(plugin: DeepSpeedPlugin, decided: Decided) -> DeepSpeedPlugin:
    """Return a copy of a plugin whose own configuration may not contradict the run."""
    plugin = replace(plugin, hf_ds_config=copy.deepcopy(plugin.given("hf_ds_config")))
    for name, (value, source) in decided.items():
        plugin.decide(DECIDED[name], value, source)
    return plugin


def _frozen_fields(plugin: DeepSpeedPlugin) -> dict[str, Config]:
    """Return the content of the configuration's file, which may change or move."""
    given = plugin.given("hf_ds_config")
    return {} if given is None else {"hf_ds_config": plugin.given_config()}


def _value(plugins: Plugins, key: str) -> object:
    plugin = active(plugins.get(NAME))
    return None if plugin is None else value_at(plugin.stated_config(), key)


def _precision(plugins: Plugins, given: str | None) -> str | None:
    """Return the precision of DeepSpeed's configuration, where the run requests none."""
    if given is not None:
        return given
    enabled = (name for name in ("bf16", "fp16") if _value(plugins, f"{name}.enabled") is True)
    return next(enabled, None)


def _accumulation_steps(plugins: Plugins) -> int | None:
    steps = _value(plugins, "gradient_accumulation_steps")
    return steps if isinstance(steps, int) else None


def _refused_format(request: Request) -> Problem | None:
    if request.mixed_precision == "fp16" and request.device_type == "cpu":
        return Problem(
            "mixed_precision='fp16' under DeepSpeed on a CPU",
            "DeepSpeed computes in fp16 on accelerators only",
            "Use mixed_precision='bf16' or mixed_precision='no'.",
        )
    if request.mixed_precision == "fp8":
        return Problem(
            "mixed_precision='fp8' under DeepSpeed",
            "its engine keeps weights in bf16 or fp16, which layers of fp8 would round twice",
            "Use mixed_precision='bf16', or fp8 with FSDP: FullyShardedDataParallelPlugin().",
        )
    return None


def _problems(request: Request) -> list[Problem]:
    problems = Problems()
    if (refused := _refused_format(request)) is not None:
        problems.append(refused)
    plugin = active(request.plugins.get(NAME))
    if plugin is None or not plugin.decided:
        return problems
    claims = Claims(plugin)
    problems += claims.problems
    for name in (name for name in ("optimizer", "scheduler") if name in claims.config):
        problems.add(
            f"{plugin.place}: {name} with {name}= of the recipe",
            "the recipe decides it",
            f"Take the section {name} out of the configuration.",
        )
    return problems


def _dims(plugins: Plugins, environment: Environment, sizes: ParallelismConfig) -> ParallelDims:
    """Return the dimensions of a run whose ranks shard state, and may share sequences."""
    size, sp = environment.world_size, sizes.sp_size
    if size % sp:
        value, rule = f"ParallelismConfig(sp_size={sp})", f"it divides the {size} processes"
        raise ConfigError.of(value, rule, f"Start a multiple of {sp}.")
    return ParallelDims(dp_shard=size // sp, cp=sp)


# Stage 3 trains the shards of fp32 weights themselves; the others train copies of them.
MEMORY = (
    MemoryLayout("zero1", frozenset({"optimizer"}), casts_weights=True, copies_fp32=True),
    MemoryLayout(
        "zero2", frozenset({"gradients", "optimizer"}), casts_weights=True, copies_fp32=True
    ),
    MemoryLayout("zero3", frozenset({"parameters", "gradients", "optimizer"}), casts_weights=True),
)
SPEC = StrategySpec(
    name=NAME,
    place="accel.strategies.deepspeed.strategy:DeepSpeedStrategy",
    plugins=(
        PluginSpec(
            name=NAME,
            kind=DeepSpeedPlugin,
            reported=DistributedType.DEEPSPEED,
            argument="deepspeed_plugin",
            aliases=("deepspeed_plugins",),
            switch="ACCELERATE_USE_DEEPSPEED",
            prefixes=PREFIXES,
            read=_read,
            adopt=_adopt,
            frozen_fields=_frozen_fields,
            shared=True,
            launch_variables=LAUNCH_VARIABLES,
            not_launched=NOT_LAUNCHED,
        ),
    ),
    owns_precision=True,
    owns_accumulation=True,
    owns_parameters=True,
    hooks_inside=True,
    clips_value=False,
    packages=("deepspeed",),
    dims=_dims,
    precision=_precision,
    accumulation_steps=_accumulation_steps,
    memory=MEMORY,
    problems=_problems,
)
