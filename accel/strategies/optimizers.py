"""Kinds of optimizers that a strategy cannot treat as torch's AdamW.

The update of an element may depend on other elements of its tensor, or be made in the backward
pass (LOMO). A strategy that gives an optimizer shards or one flat tensor in place of each weight
turns such optimizers into other algorithms, or makes them fail. So it is with state that is
quantized by blocks of elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel.machine.errors import ConfigError

# By class name: norms or factors of whole tensors, orthogonal updates, one estimate for all.
WHOLE_TENSOR = frozenset(
    (
        *("Adafactor", "AdaLomo", "AdamMini", "Adam_mini", "CAME", "CAMEAdamW", "DAdaptAdam"),
        *("DAdaptAdaGrad", "DAdaptLion", "DAdaptSGD", "DistributedShampoo", "Fromage"),
        *("FusedLAMB", "FusedLamb", "FusedNovoGrad", "GaLoreAdafactor", "GaLoreAdamW", "Kron"),
        *("LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon", "Nero", "NovoGrad", "NvNovoGrad"),
        *("OnebitLamb", "PSGD", "Prodigy", "ProdigyOpt", "SM3", "SOAP", "Scion", "Shampoo"),
    )
)
# By class name: each element is stepped by its own gradient and state alone.
ELEMENTWISE = frozenset(
    (
        *("ASGD", "AdEMAMix", "AdaBelief", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("CPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion"),
        *("DummyOptim", "FusedAdam", "FusedLion", "FusedSGD", "Lion", "NAdam", "RAdam"),
        *("RMSprop", "RoundingAdamW", "Rprop", "SGD", "Sophia", "SophiaG"),
    )
)
# What torch's DTensor has no rule for, as of the versions that accel runs on: `step` fails.
NO_DTENSOR = frozenset({"Adafactor", "LBFGS", "Rprop"})
# Packages whose optimizers keep state in 8 bits and less.
QUANTIZING = ("torchao.optim", "bitsandbytes.optim")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the `step` of `optimizer` is that of a class in `ELEMENTWISE`."""
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind):
            return kind.__name__ in ELEMENTWISE
    return False


def named_kind(optimizer: torch.optim.Optimizer, names: frozenset[str]) -> str | None:
    """Return the name by which the class of `optimizer`, or a base of it, is in `names`."""
    return next((k.__name__ for k in type(optimizer).__mro__ if k.__name__ in names), None)


def quantized_kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of an optimizer that quantizes its state by blocks; None for others.

    Blocks that a shard cuts have other scales; and which state is quantized depends on the size of
    a shard, which differs between ranks.
    """
    kind = type(optimizer)
    module = next((k.__module__ for k in kind.__mro__ if k.__module__.startswith(QUANTIZING)), None)
    if module is None or getattr(optimizer, "block_size", None) == float("inf"):
        return None
    return f"{module.partition('.')[0]}'s {kind.__name__}"


STATE = "updated_in_backward"  # key in an optimizer's state dict
# AdaLOMO's moments, each by the name of a weight, and its count of updates: attributes, which its
# own state dict leaves out.
MOMENTS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
COUNT = "step_num"


def prepare_optimizer(optimizer: torch.optim.Optimizer, world_size: int) -> None:
    """Let `step` of an optimizer that updates in the backward pass do nothing; keep all its state.

    Raises:
        ConfigError: on several processes.
    """
    if not callable(getattr(optimizer, "fused_backward", None)):
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
