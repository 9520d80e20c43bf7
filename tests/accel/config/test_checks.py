"""Types of single fields, checked the same way in every configuration dataclass (E1, E5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accel.config.fp8 import TERecipeKwargs
from accel.config.handlers import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProfileKwargs,
)
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from accel.machine.errors import ConfigError

SWITCH, WHOLE, NUMBER = "expected true or false", "it is a whole number", "it is a number"


@pytest.mark.parametrize(
    ("kind", "field", "value", "rule"),
    [
        (DataLoaderConfiguration, "split_batches", "no", SWITCH),
        (DataLoaderConfiguration, "non_blocking", 2, SWITCH),
        (DataLoaderConfiguration, "data_seed", "1", WHOLE),
        (DistributedDataParallelKwargs, "find_unused_parameters", "False", SWITCH),
        (DistributedDataParallelKwargs, "bucket_cap_mb", "25", WHOLE),
        (GradScalerKwargs, "init_scale", "8", NUMBER),
        (GradScalerKwargs, "init_scale", -1, "it is above 0"),
        (GradScalerKwargs, "backoff_factor", 1, "it is above 0 and below 1"),
        (GradScalerKwargs, "growth_interval", 0, "it is at least 1"),
        (GradientAccumulationPlugin, "num_steps", "2", WHOLE),
        (ProjectConfiguration, "total_limit", "3", WHOLE),
        (ProfileKwargs, "with_stack", "no", SWITCH),
        (TERecipeKwargs, "margin", "0", WHOLE),
        (ParallelismConfig, "cp_size", 1.5, WHOLE),
        (TorchTensorParallelPlugin, "tp_size", "2", WHOLE),
    ],
)
def test_a_value_of_another_type_is_refused(kind: Any, field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    (problem,) = caught.value.problems
    assert problem.value == f"{kind.__name__}.{field}={value!r}"
    assert problem.rule == rule
    assert problem.remedy.startswith("Give ")


def test_numpy_and_the_two_whole_numbers_of_a_boolean_are_taken() -> None:
    config = DataLoaderConfiguration(np.True_, None, 0, data_seed=np.int64(3))  # type: ignore[arg-type]
    assert (config.split_batches, config.even_batches, config.data_seed) == (True, False, 3)
    assert type(config.split_batches) is type(config.even_batches) is bool
    scaler = GradScalerKwargs(init_scale=np.float32(8), growth_factor=3)  # type: ignore[arg-type]
    assert (scaler.init_scale, scaler.growth_factor) == (8, 3)
