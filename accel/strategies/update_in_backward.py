"""Optimizers that update each weight in the backward pass, as LOMO and AdaLOMO do.

They never hold all gradients, and so cannot wait until these are averaged over ranks.

Source: https://arxiv.org/abs/2306.09782 and https://arxiv.org/abs/2310.10195
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel.machine.errors import ConfigError

STATE = "updated_in_backward"  # key in an optimizer's state dict
# AdaLOMO's moments, each by the name of a weight, and its count of updates: attributes, which its
# own state dict leaves out.
MOMENTS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
COUNT = "step_num"


def updates_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates weights in the backward pass (`lomo_backward`)."""
    return callable(getattr(optimizer, "fused_backward", None))


def prepare_optimizer(optimizer: torch.optim.Optimizer, world_size: int) -> None:
    """Let `step` of such an optimizer do nothing, and its state dict hold all of its state.

    Raises:
        ConfigError: on several processes.
    """
    if not updates_in_backward(optimizer):
        return
    if world_size > 1:
        raise ConfigError.of(
            f"prepare: {type(optimizer).__name__} on {world_size} processes",
            "it updates weights in the backward pass, before gradients are averaged",
            "Train on one process, or use AdamW.",
        )
    # torch wraps the method of each class that is instantiated.
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Optimizer.step):
        optimizer.step = _no_step  # type: ignore[method-assign,assignment]
    hooks = optimizer._optimizer_state_dict_post_hooks.values()
    if hasattr(optimizer, MOMENTS[0]) and _save not in hooks:
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_load)


def _no_step(closure: Callable[[], float] | None = None) -> None:
    """Do nothing: the backward pass has updated the weights."""


def _save(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    moments = {name: dict(getattr(optimizer, name)) for name in MOMENTS}
    state[STATE] = {**moments, COUNT: getattr(optimizer, COUNT)}


def _load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(state)
    saved = own.pop(STATE, None)
    if saved is not None:
        setattr(optimizer, COUNT, int(saved[COUNT]))
        for name in MOMENTS:
            live = getattr(optimizer, name)
            for weight, value in saved[name].items():
                live[weight].copy_(value)
    return own
