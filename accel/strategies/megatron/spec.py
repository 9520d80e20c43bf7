"""The spec of Megatron-LM: documented, and not built yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.errors import NotBuiltError, Problem
from accel.planning.spec import PluginSpec, StrategySpec

ARGUMENT = "megatron_lm_plugin"


def _refuse(given: Any, variables: Mapping[str, str]) -> None:
    rule = "this version does not offer it yet"
    remedy = "Leave it out: the model is then replicated by DDP."
    raise NotBuiltError(Problem(ARGUMENT, rule, remedy))


SPEC = StrategySpec(
    name="megatron_lm",
    place="",
    plugins=(
        PluginSpec(
            name="megatron_lm",
            kind=None,
            argument=ARGUMENT,
            switch="ACCELERATE_USE_MEGATRON_LM",
            read=_refuse,
        ),
    ),
)
