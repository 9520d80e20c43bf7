"""Optimizers by name.

An optimizer factory is called with the model; the other arguments come from the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from accel.machine.errors import ConfigError, Problem, Problems, unknown_choice
from accel.precision.rounding_adamw import RoundingAdamW

STATE_FORMATS = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def adamw(
    model: torch.nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    fused: bool | None = None,
    state_format: str | None = None,
    stochastic_rounding: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW over the model's trainable parameters, those of fewer than 2 dims not decayed.

    With `state_format` it is torchao's, which compiles its update for each size of a weight at the
    first step; with `stochastic_rounding` alone the engine's, whose moments are in fp32.

    Args:
        model: whose parameters are trained.
        lr: peak learning rate.
        weight_decay: decoupled decay of matrices and kernels; biases and gains are not decayed.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        fused: whether one kernel updates all parameters; None: where the device has it.
        state_format: of the moments of weights of 4096 and more elements: 8bit, 4bit or fp8, with a
            scale for each block; None: that of the weights, or fp32 with stochastic rounding.
        stochastic_rounding: whether updates of weights in bf16 are rounded up or down at random, so
            that small ones are kept in the mean (`precision=bf16_weights`).

    Raises:
        ConfigError: naming the values that are out of their range.
        MissingPackageError: if torchao is needed and not installed.

    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101;
    https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html
    """
    numbers = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    check_ranges("optimizer", **{name: (value, 0, math.inf) for name, value in numbers.items()})
    _check_betas(betas)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = decay_groups(trainable, weight_decay)
    options: dict[str, Any] = {
        "lr": lr,
        "betas": (float(betas[0]), float(betas[1])),
        "eps": eps,
    }
    if state_format is None:
        options["fused"] = supports_fused(trainable) if fused is None else fused
        own = RoundingAdamW if stochastic_rounding else torch.optim.AdamW
        return own(groups, **options)
    kind = _torchao_kind(state_format, fused)
    made: torch.optim.Optimizer = kind(groups, **options, bf16_stochastic_round=stochastic_rounding)
    made.register_step_post_hook(keep_moments_in_fp32)
    return made


def keep_moments_in_fp32(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Convert plain moments in bf16, those of small weights, to fp32; their next update keeps it.

    A second moment in bf16 would not fall (`accel.precision.rounding_adamw`).
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if type(value) is torch.Tensor and value.dtype == torch.bfloat16:
                state[name] = value.float()


def _torchao_kind(state_format: str, fused: bool | None) -> Any:
    """Return torchao's class of AdamW with moments in this format."""
    found = Problems()
    if state_format not in STATE_FORMATS:
        found.append(unknown_choice("optimizer.state_format", state_format, STATE_FORMATS))
    if fused:
        rule = "torchao compiles its own update"
        found.add("optimizer.fused=true with torchao's AdamW", rule, "Leave it out.")
    found.raise_if()
    from accel.precision.fp8 import import_torchao

    kinds = import_torchao("torchao.optim", "an optimizer of torchao")
    return getattr(kinds, STATE_FORMATS[state_format])


def _check_betas(betas: Sequence[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        rule = "two decay rates from 0 to below 1 are required"
        given = Problem(f"optimizer.betas={list(betas)}", rule, "Set optimizer.betas=[0.9,0.999].")
        raise ConfigError(given)


def decay_groups(
    parameters: Sequence[torch.nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Return one group of the parameters of 2 and more dims, decayed, and one of the others.

    A group without parameters is dropped.
    """
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def supports_fused(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether torch's fused kernels take all these parameters."""
    return all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in parameters)


def check_ranges(node: str, **limits: tuple[float, float, float]) -> None:
    """Raise if an argument of a node is outside of its range.

    Each is given as (value, least, most), both allowed; an infinite one is no limit.

    Raises:
        ConfigError: naming every such number.
    """
    found = Problems()
    for name, (value, least, most) in limits.items():
        if not least <= value <= most or not math.isfinite(value):
            to = f"from {least:g} to {most:g}"
            rule = f"finite and at least {least:g}" if math.isinf(most) else to
            found.add(f"{node}.{name}={value}", f"it must be {rule}", "Correct the value.")
    found.raise_if()
