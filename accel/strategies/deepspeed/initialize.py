"""Starting an engine, and the casts around its model.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from accel import env, tree
from accel.planning.plan import Plan
from accel.strategies.deepspeed import package
from accel.strategies.deepspeed.dummies import DummyOptim, DummyScheduler
from accel.strategies.deepspeed.settings import Settings
from accel.wrapping import MakeContext, wrap_forward


def start(
    deepspeed: ModuleType,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedulers: Sequence[Any],
    settings: Settings,
    plan: Plan,
) -> Any:
    """Return the `DeepSpeedEngine` of a model. Called on every rank.

    Args:
        deepspeed: the package.
        model: the user's own.
        optimizer: the user's own, or its stand-in; None: the model is only evaluated.
        schedulers: of which a `DummyScheduler` may build the engine's own.
        settings: complete.
        plan: of the run, for the place of this process on its node.

    Raises:
        ConfigError: naming everything that contradicts itself in `settings`.
    """
    arguments: dict[str, Any] = {"model": model, "config": settings.finish()}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        arguments["optimizer"] = optimizer
    dummy = next((s for s in schedulers if isinstance(s, DummyScheduler)), None)
    if dummy is not None and dummy.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = dummy.lr_scheduler_callable
    package.join_group(deepspeed, plan.local_world_size)
    if settings.on_disk:
        package.build(deepspeed, "AsyncIOBuilder")
    # A lone process has no launcher, hence LOCAL_RANK.
    with env.patched(LOCAL_RANK=plan.local_rank), package.own_formats(deepspeed):
        started, *_ = deepspeed.initialize(**arguments)
    return started


def cast_forward(module: torch.nn.Module, dtype: torch.dtype, make_context: MakeContext) -> None:
    """Give `module` floating inputs as `dtype`, and return its outputs in fp32.

    Args:
        module: its weights are `dtype`.
        dtype: bf16 or fp16.
        make_context: gives a fresh context for each forward pass: autocast to `dtype`, which lets
            losses, norms and softmax inside be computed in fp32.
    """

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inputs = tree.recursively_apply(
            lambda tensor: tensor.to(dtype),
            (args, kwargs),
            test_type=lambda leaf: isinstance(leaf, torch.Tensor) and leaf.is_floating_point(),
        )
        return inputs[0], inputs[1]

    module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
    wrap_forward(module, make_context)
