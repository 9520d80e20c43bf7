"""transformers asks one object whether models are built in shards: it is given the run's.

It keeps that object weakly, and imports nothing of ours. Whoever holds what `announce` returns
decides how long it lives.

Source: https://huggingface.co/docs/transformers/main_classes/deepspeed
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from accel.config.deepspeed import HfDeepSpeedConfig
from accel.imports import is_available, require


def _integration() -> ModuleType:
    return require("transformers.integrations.deepspeed", "deepspeed_plugin")


def announce(config: dict[str, Any]) -> HfDeepSpeedConfig | None:
    """Let transformers build models in shards from now on, if it is installed.

    Args:
        config: DeepSpeed's, complete enough for `deepspeed.zero.Init`.

    Returns:
        What transformers now asks, to be kept; None if it is not installed.
    """
    if not is_available("transformers"):
        return None
    told = HfDeepSpeedConfig(config)
    _integration().set_hf_deepspeed_config(told)
    return told


def withdraw(told: HfDeepSpeedConfig) -> None:
    """Let transformers build whole models again, unless another object has been announced since.

    Args:
        told: what `announce` returned.
    """
    integration = _integration()
    if integration.is_deepspeed_zero3_enabled() and integration.deepspeed_config() is told.config:
        integration.unset_hf_deepspeed_config()
