"""DeepSpeed, at the documented path: re-exports of the modules that describe and run it."""

from __future__ import annotations

from accel.config.deepspeed_active import get_active_deepspeed_plugin
from accel.config.deepspeed_json import HfDeepSpeedConfig
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
)

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]
