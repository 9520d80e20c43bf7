"""Optimizers by name.

An optimizer factory is called with the model; the other arguments come from the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel.machine.errors import ConfigError, Problem, Problems, unknown_choice
from accel.machine.imports import require
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
    options: dict[str, Any] = {"lr": lr, "betas": (float(betas[0]), float(betas[1])), "eps": eps}
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
    decayed = [parameter for parameter in parameters if num_dims(parameter) >= 2]
    others = [parameter for parameter in parameters if num_dims(parameter) < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def num_dims(parameter: torch.nn.Parameter) -> int:
    """Return the dims of a parameter, also if it was partitioned while its model was built."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def supports_fused(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether torch's fused kernels take all these parameters."""
    return all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in parameters)


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

    Args:
        matrices: parameters of 2 dims.
        others: parameter groups for AdamW.
        of_muon: options of torch's Muon.
        of_adamw: options of torch's AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[torch.nn.Parameter],
        others: Sequence[dict[str, Any]],
        of_muon: dict[str, Any],
        of_adamw: dict[str, Any],
    ) -> None:
        self._muon = torch.optim.Muon([{"params": matrices, "name": "muon"}], **of_muon)
        named = [{**group, "name": "adamw"} for group in others]
        self._adamw = torch.optim.AdamW(named or [{"params": []}], **of_adamw)
        groups = [*self._muon.param_groups, *self._adamw.param_groups]
        super().__init__([g for g in groups if g["params"]], self._adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters.

        Args:
            closure: computes the loss again.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for inner in (self._muon, self._adamw):
            # A restored state, and parameters that an engine exchanged, are in this object alone.
            inner.state = self.state
            is_muon = inner is self._muon
            inner.param_groups = [g for g in self.param_groups if ("ns_steps" in g) is is_muon]
            inner.step()
        return loss


def muon(
    model: torch.nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    adamw: Sequence[str] | None = None,
    adamw_lr: float | None = None,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    adjust_lr_fn: str = "match_rms_adamw",
) -> torch.optim.Optimizer:
    """Return torch's Muon over the hidden matrices of a model, and AdamW over its other parameters.

    Args:
        model: whose parameters are trained.
        lr: peak learning rate.
        weight_decay: decoupled decay of matrices and kernels; biases and gains are not decayed.
        momentum: of Muon.
        adamw: patterns of the names of matrices for AdamW; None: those of embeddings and of the
            last linear layer.
        adamw_lr: peak learning rate of AdamW; None: `lr`.
        betas: decay rates of AdamW's two moments.
        eps: added to the root of AdamW's second moment.
        adjust_lr_fn: how Muon's rate follows the shape of a matrix: match_rms_adamw, for rates as
            of AdamW, or original.

    Raises:
        ConfigError: if a number is out of its range, or the model has no hidden matrices.

    Source: K. Jordan, https://kellerjordan.github.io/posts/muon; J. Liu et al., Muon is Scalable
    for LLM Training, arXiv:2502.16982; https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
    """
    rates = {"lr": lr, "adamw_lr": lr if adamw_lr is None else adamw_lr}
    numbers = {**rates, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
    check_ranges("optimizer", **{name: (value, 0, math.inf) for name, value in numbers.items()})
    _check_betas(betas)
    trainable = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if adamw is None:
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        apart = {module.weight for module in (*embeddings, *linear[-1:])}
    else:
        apart = {p for p, name in trainable.items() if any(fnmatchcase(name, one) for one in adamw)}
    matrices = [p for p in trainable if num_dims(p) == 2 and p not in apart]
    if not matrices:
        raise ConfigError.of(
            f"optimizer=muon with {type(model).__name__}",
            "it has no matrices between its embeddings and its last layer",
            "Choose optimizer=adamw, or name what AdamW trains: optimizer.adamw=['head.*'].",
        )
    hidden = set(matrices)
    others = [parameter for parameter in trainable if parameter not in hidden]
    of_muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    of_adamw = {"lr": rates["adamw_lr"], "betas": (float(betas[0]), float(betas[1])), "eps": eps}
    groups = decay_groups(others, weight_decay)
    return Muon(matrices, groups, {**of_muon, "adjust_lr_fn": adjust_lr_fn}, of_adamw)


def schedule_free(
    model: torch.nn.Module,
    lr: float = 2.5e-3,
    weight_decay: float = 0.01,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    warmup_steps: int = 0,
) -> torch.optim.Optimizer:
    """Return schedulefree's AdamW, which averages weights in place of a schedule.

    Evaluations and checkpoints have the averaged weights.

    Args:
        model: whose parameters are trained.
        lr: learning rate after the warm-up.
        weight_decay: decay of matrices and kernels; biases and gains are not decayed.
        betas: the weight of the average in the point of the gradient, and the decay rate of the
            second moment.
        eps: added to the root of the second moment.
        warmup_steps: optimizer steps of a linear warm-up.

    Raises:
        ConfigError: naming the values that are out of their range.
        MissingPackageError: if schedulefree is not installed.

    Source: A. Defazio et al., The Road Less Scheduled, arXiv:2405.15682;
    https://github.com/facebookresearch/schedule_free
    """
    numbers = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "warmup_steps": warmup_steps}
    check_ranges("optimizer", **{name: (value, 0, math.inf) for name, value in numbers.items()})
    _check_betas(betas)
    package: Any = require("schedulefree", "optimizer=schedule_free")

    class ScheduleFreeAdamW(package.AdamWScheduleFree):
        """Gives training weights back with the same bits after an evaluation or a resume."""

        def eval(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"] if group["train_mode"] else ():
                    if "z" in self.state[parameter]:
                        self.state[parameter]["trained"] = parameter.detach().clone()
            super().eval()

        @torch.no_grad()
        def train(self) -> None:
            super().train()
            for parameter in (p for group in self.param_groups for p in group["params"]):
                trained = self.state[parameter].pop("trained", None)
                if trained is not None:
                    parameter.copy_(trained)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups, decays = decay_groups(trainable, weight_decay), (float(betas[0]), float(betas[1]))
    made: torch.optim.Optimizer = ScheduleFreeAdamW(groups, lr, decays, eps, 0.0, warmup_steps)
    return made


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
