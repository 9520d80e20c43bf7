"""Single fields of configuration dataclasses: what each refuses, and how it is spelled (E1, E5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accel.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accel.config.handlers import DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import DynamoBackend
from accel.machine.errors import ConfigError
from accel.utils.dataclasses import BnbQuantizationConfig


class Mesh:
    """Has the axes of a `DeviceMesh` and their sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name: str) -> Mesh:
        return Mesh(**{name: self.sizes[name]})

    def size(self) -> int:
        return next(iter(self.sizes.values()))


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


FOUR = {"load_in_4bit": True}
WRONG: dict[Any, list[tuple[dict[str, Any], str]]] = {
    GradientAccumulationPlugin: [({"num_steps": 0}, "num_steps=0")],
    TorchDynamoPlugin: [
        ({"backend": "inductr"}, "Did you mean 'inductor'"),
        ({"mode": "max"}, "mode='max'"),
        ({"options": 3}, "options=3"),
        ({"backend": "eager", "mode": "max-autotune"}, "only inductor"),
        ({"backend": "inductor", "mode": "max-autotune", "options": {"x": 1}}, "one of the two"),
    ],
    TorchTensorParallelPlugin: [
        ({"tp_size": 0}, "tp_size=0"),
        ({"torch_device_mesh": Mesh(dp=2)}, "one of its axes is named 'tp'"),
        ({"tp_size": 2, "torch_device_mesh": Mesh(tp=4)}, "tp_size=2"),
        ({"tp_plan": {}}, "tp_plan={}"),
        ({"tp_plan": {"up": "colwize"}}, "Did you mean 'colwise'"),
    ],
    ParallelismConfig: [
        ({"tp_size": 0}, "tp_size=0: it is at least 1"),
        ({"dp_shard_size": -1}, "dp_shard_size=-1"),
        ({"dp_replicate_size": 0}, "dp_replicate_size=0"),
        ({"cp_backend": "rings"}, "cp_backend"),
        ({"sp_backend": "torch"}, "sp_backend"),
    ],
    BnbQuantizationConfig: [
        ({}, "can't be both False"),
        ({**FOUR, "load_in_8bit": True}, "can't be both True"),
        ({**FOUR, "llm_int8_threshold": -1.0}, "llm_int8_threshold=-1.0: it is at least 0"),
        ({**FOUR, "bnb_4bit_quant_type": "nf5"}, "quant_type='nf5': it is one of fp4, nf4"),
        ({**FOUR, "bnb_4bit_compute_dtype": "fp31"}, "compute_dtype='fp31': it is one of fp32"),
        ({**FOUR, "torch_dtype": torch.int8}, "BnbQuantizationConfig.torch_dtype=torch.int8"),
        ({**FOUR, "skip_modules": "head"}, "skip_modules='head': it is a list of names"),
    ],
    DistributedDataParallelKwargs: [
        ({"comm_wrapper": "power_sgd"}, "it is one of no, fp16, bf16"),
        ({"comm_hook": "fp61"}, "Did you mean 'fp16'"),
        ({"bucket_cap_mb": 0}, "at least 1"),
    ],
    FP8RecipeKwargs: [
        ({"backend": "TEE"}, "Did you mean 'TE'?"),
        ({"opt_level": "O3"}, "it is one of O1, O2"),
    ],
    TERecipeKwargs: [
        ({"fp8_format": "E4M4"}, "Did you mean 'E4M3'?"),
        ({"amax_history_len": 0}, "at least 1"),
        ({"override_linear_precision": (True, False)}, "three booleans"),
    ],
    AORecipeKwargs: [
        ({"module_filter_func": "torch.no_such"}, "dotted name"),
        ({"module_filter_func": lambda name: True}, "it is called with a module and its name"),
        ({"config": "rowise"}, "Did you mean 'rowwise'?"),
        (
            {"config": "rowwise", "enable_fsdp_float8_all_gather": True},
            "a weight that is gathered in fp8 has one scale",
        ),
        ({"config": object(), "pad_inner_dim": True}, "given in two places"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"), [(kind, *row) for kind, rows in WRONG.items() for row in rows]
)
def test_wrong_values_are_named(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_a_backend_is_named_in_any_case(backend: Any) -> None:
    assert TorchDynamoPlugin(backend=backend).backend == DynamoBackend.INDUCTOR
    assert TorchDynamoPlugin(backend=None).backend == DynamoBackend.NO


def test_the_size_is_that_of_the_mesh() -> None:
    assert TorchTensorParallelPlugin(torch_device_mesh=Mesh(dp=2, tp=4)).tp_size == 4
    assert TorchTensorParallelPlugin(tp_size=4, torch_device_mesh=Mesh(tp=4)).tp_size == 4


def test_names_of_styles_of_transformers_are_known() -> None:
    plan = {"a": "colwise", "b": "embedding_rowwise", "c": object()}
    assert TorchTensorParallelPlugin(tp_plan=plan).tp_plan == plan


def test_the_other_weights_have_a_dtype() -> None:
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype == torch.float16
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert four.torch_dtype == four.bnb_4bit_compute_dtype == torch.bfloat16
    given = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    assert given.torch_dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_have_several_names(given: Any, expected: torch.dtype) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=given)
    assert config.bnb_4bit_compute_dtype == expected
