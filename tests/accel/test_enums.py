"""The enumerations hold the documented values, by name, by value, and as strings."""

from __future__ import annotations

import pytest

from accel import DistributedType
from accel.enums import BaseEnum
from accel.utils import ComputeEnvironment, LoggerType, PrecisionType, SageMakerDistributedType

DOCUMENTED: dict[type[BaseEnum], dict[str, str]] = {
    DistributedType: {
        "NO": "NO",
        "MULTI_CPU": "MULTI_CPU",
        "MULTI_GPU": "MULTI_GPU",
        "DEEPSPEED": "DEEPSPEED",
        "TPU": "XLA",  # the documentation's older name
    },
    LoggerType: {
        "ALL": "all",
        "TENSORBOARD": "tensorboard",
        "WANDB": "wandb",
        "COMETML": "comet_ml",
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


def test_a_tpu_is_an_xla_device() -> None:
    assert DistributedType.TPU is DistributedType.XLA
