"""Scales of weights that FSDP2 all-gathers in fp8: computed for all of them at once.

Each rank holds a shard of a weight, and the weight has one scale. torchao computes it when the
weight is gathered, by an all-reduce a weight; here one all-reduce does so for all, as a forward
pass begins: whoever has changed the weights since, their scales are right.

Source: https://docs.pytorch.org/ao/stable/generated/torchao.float8.precompute_float8_dynamic_scale_for_fsdp.html
"""

from __future__ import annotations

from typing import Any

import torch

from accel.machine.enums import FP8BackendType
from accel.plan.plan import Plan
from accel.precision.fp8 import import_torchao, linear_config
from accel.strategies.mesh.torch_internals import Models, forget_scale, outside_graphs


def gathers_in_fp8(plan: Plan, offloads: bool) -> bool:
    """Return whether the weights of a run are gathered in fp8 and lie where they are computed."""
    fp8: Any = plan.fp8
    if fp8.backend != FP8BackendType.AO or offloads:
        return False
    return bool(linear_config(fp8.recipe, plan.device).enable_fsdp_float8_all_gather)


def scale_before_forwards(model: torch.nn.Module) -> None:
    """Let each forward pass of `model` begin with the scales of the weights that it gathers."""
    model.register_forward_pre_hook(_scale, prepend=True)


@outside_graphs
def _scale(model: torch.nn.Module, *_: object) -> None:
    import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def forget_scales(model: torch.nn.Module) -> None:
    """Let torchao compute the scales of `model`, whose weights have changed, as it gathers them.

    So it does where a part of the model is called by itself.
    """
    layer_kind = import_torchao("torchao.float8.float8_linear").Float8Linear
    for module in model.modules():
        if isinstance(module, layer_kind):
            forget_scale(module.weight)


def forget_after_steps(optimizer: torch.optim.Optimizer, models: Models) -> None:
    """Let each step of `optimizer` end without the scales of the weights before it."""

    def after(*_: object) -> None:
        for model in models:
            forget_scales(model)

    optimizer.register_step_post_hook(after)
