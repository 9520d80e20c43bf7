"""Scales of weights that FSDP2 all-gathers in fp8: computed for all of them at once.

Each rank holds a shard of a weight, and the weight has one scale. torchao computes it when the
weight is gathered, by an all-reduce a weight; `scale_weights` does so by one for all, after the
weights have changed.

Source: https://docs.pytorch.org/ao/stable/generated/torchao.float8.precompute_float8_dynamic_scale_for_fsdp.html
"""

from __future__ import annotations

from typing import Any

import torch

from accel.enums import FP8BackendType
from accel.planning.plan import Plan
from accel.precision.fp8 import import_torchao, linear_config
from accel.strategies.mesh.reshard_schedule import reshard
from accel.strategies.mesh.torch_internals import Models


def gathers_in_fp8(plan: Plan, offloads: bool) -> bool:
    """Return whether the weights of a run are gathered in fp8 and lie where they are computed."""
    fp8: Any = plan.fp8
    if fp8.backend != FP8BackendType.AO or offloads:
        return False
    return bool(linear_config(fp8.recipe, plan.device).enable_fsdp_float8_all_gather)


def scale_weights(model: torch.nn.Module) -> None:
    """Compute the scales of all weights of `model` that are gathered in fp8; collective."""
    reshard(model)
    import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def scale_after_steps(optimizer: torch.optim.Optimizer, models: Models) -> None:
    """Let each step of `optimizer` end with the scales of the weights of `models`."""

    def after(*_: object) -> None:
        for model in models:
            scale_weights(model)

    optimizer.register_step_post_hook(after)
