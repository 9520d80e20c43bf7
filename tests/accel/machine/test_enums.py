"""The enumerations hold the documented values, by name, by value, and as strings (E1)."""

from __future__ import annotations

import pytest

from accel import DistributedType
from accel.machine.enums import BaseEnum, FP8BackendType
from accel.utils import (
    ComputeEnvironment,
    CustomDtype,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)

DOCUMENTED: dict[type[BaseEnum], dict[str, str]] = {
    DistributedType: {
        "NO": "NO",
        "MULTI_CPU": "MULTI_CPU",
        "MULTI_GPU": "MULTI_GPU",
        "DEEPSPEED": "DEEPSPEED",
        "TPU": "XLA",  # the documentation's older name
        **{
            name: name
            for name in (
                *("FSDP", "MEGATRON_LM", "XLA", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA"),
                *("MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA", "MULTI_XPU"),
            )
        },
    },
    FP8BackendType: {name: name for name in ("NO", "TE", "MSAMP", "AO")},
    LoggerType: {
        "ALL": "all",
        "TENSORBOARD": "tensorboard",
        "WANDB": "wandb",
        "COMETML": "comet_ml",
        **{
            name.upper(): name
            for name in ("aim", "clearml", "dvclive", "mlflow", "swanlab", "trackio")
        },
    },
    RNGType: {
        name.upper(): name
        for name in (
            *("torch", "cuda", "generator", "xla", "hpu", "mlu", "musa", "neuron", "npu"),
            *("sdaa", "xpu"),
        )
    },
    DynamoBackend: {
        name.upper(): name
        for name in (
            *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser"),
            *("cudagraphs", "ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once"),
            *("torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
        )
    },
    ComputeEnvironment: {
        "LOCAL_MACHINE": "LOCAL_MACHINE",
        "AMAZON_SAGEMAKER": "AMAZON_SAGEMAKER",
    },
    SageMakerDistributedType: {
        "NO": "NO",
        "DATA_PARALLEL": "DATA_PARALLEL",
        "MODEL_PARALLEL": "MODEL_PARALLEL",
    },
    CustomDtype: {"FP8": "fp8", "INT4": "int4", "INT2": "int2"},
    PrecisionType: {"NO": "no", "FP8": "fp8", "FP16": "fp16", "BF16": "bf16"},
}


@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda kind: kind.__name__)
def test_values(kind: type[BaseEnum]) -> None:
    for name, value in DOCUMENTED[kind].items():
        member = getattr(kind, name)
        assert kind[name] is kind(value) is member
        assert member == value == str(member) == f"{member}"
        assert value in kind
        assert value in kind.list()
    assert "no such value" not in kind
    with pytest.raises(ValueError, match="no such value"):
        kind("no such value")
