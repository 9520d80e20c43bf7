# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.strategies.megatron.placeholders import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
)
from accel.strategies.megatron.placeholders import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accel.strategies.megatron.steps import AbstractTrainStep as AbstractTrainStep
from accel.strategies.megatron.steps import BertTrainStep as BertTrainStep
from accel.strategies.megatron.steps import GPTTrainStep as GPTTrainStep
from accel.strategies.megatron.steps import T5TrainStep as T5TrainStep
from accel.strategies.megatron.steps import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)

__all__: list[str]
