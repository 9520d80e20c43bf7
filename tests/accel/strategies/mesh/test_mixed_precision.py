"""Mixed precision of FSDP2: computation in bf16, gradients and outputs in fp32 (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel.machine.errors import ConfigError
from accel.strategies.mesh.gradients import ShardedStepScaler
from tests.accel.strategies.training import Model, build, largest, plain, train
from tests.helpers import run_distributed

BF16 = 2e-2


def check_bf16(plugin: dict[str, Any], arguments: dict[str, Any]) -> None:
    accelerator = build(fsdp=plugin, **arguments)
    model = accelerator.prepare(Model())
    seen = []
    model.blocks[0].up.register_forward_hook(
        lambda module, inputs, output: seen.append((module.weight.dtype, output.dtype))
    )
    output = model(torch.zeros(2, 4, dtype=torch.long))
    accelerator.backward(output.sum())
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert output.dtype == torch.float32
    assert model.embed.weight.dtype == torch.float32
    assert model.embed.weight.grad.dtype == torch.float32
    accelerator.end_training()
    accelerator = build(fsdp=plugin, **arguments)
    losses, _, _ = train(accelerator, Model())
    gap = largest(losses, plain(Model())[0])
    assert 0.0 < gap < BF16
    accelerator.end_training()


def check_formats() -> None:
    check_bf16({}, {"mixed_precision": "bf16"})
    check_bf16({"mixed_precision_policy": "bf16"}, {"mixed_precision": "no"})
    policy = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    check_bf16({"mixed_precision_policy": policy}, {"mixed_precision": "no"})
    fields = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "fp32"}
    check_bf16({"mixed_precision_policy": fields}, {"mixed_precision": "bf16"})
    buffers = {"mixed_precision_policy": {"buffer_dtype": "bf16"}}
    accelerator = build(fsdp=buffers, mixed_precision="no")
    assert accelerator.prepare(Model()).scale.dtype == torch.bfloat16
    accelerator.end_training()
    half = {"mixed_precision_policy": "fp16"}
    with pytest.raises(ConfigError, match="they disagree"):
        build(fsdp=half, mixed_precision="bf16")
    # Nothing of that is left. The policy settles the precision, and fp16 has its scaler.
    accelerator = build(fsdp=half, mixed_precision="no")
    assert accelerator.mixed_precision == "fp16"
    assert isinstance(accelerator.scaler, ShardedStepScaler)
    accelerator.end_training()
    # What a policy leaves open is as the run says.
    check_bf16({"mixed_precision_policy": {"reduce_dtype": "bf16"}}, {"mixed_precision": "bf16"})


@pytest.mark.slow
def test_the_engine_owns_bf16() -> None:
    run_distributed(check_formats, 2)
