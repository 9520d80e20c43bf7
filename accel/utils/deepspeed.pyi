# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.config.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accel.config.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel.strategies.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
)
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from accel.strategies.deepspeed.wrappers import DummyOptim as DummyOptim
from accel.strategies.deepspeed.wrappers import DummyScheduler as DummyScheduler

__all__: list[str]
