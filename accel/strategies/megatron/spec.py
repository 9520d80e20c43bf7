"""The spec of Megatron-LM: documented, and not built yet."""

from __future__ import annotations

from accel.strategies.spec import PluginSpec, StrategySpec

SPEC = StrategySpec(
    name="megatron_lm",
    place="",
    plugins=(
        PluginSpec(
            name="megatron_lm",
            kind=None,
            argument="megatron_lm_plugin",
            switch="ACCELERATE_USE_MEGATRON_LM",
        ),
    ),
)
