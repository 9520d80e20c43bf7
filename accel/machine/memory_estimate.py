"""Bytes of parameters, gradients and optimizer state that one process holds."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SWITCHES = {"foreach", "fused", "capturable"}


@dataclass(frozen=True)
class Footprint:
    """What one process holds of a run's models, in bytes, once it has made a step.

    Attributes:
        parameters: of the models, frozen ones included.
        gradients: of trainable parameters.
        optimizer_state: what optimizers keep between steps, copies of weights in another format
            included; None: not known before the first step.
    """

    parameters: int
    gradients: int
    optimizer_state: int | None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies in this process (of a DTensor; else the tensor)."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the elements of tensors that lie in this process, each counted once."""
    parts = [local(tensor) for tensor in {id(t): t for t in tensors}.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def state_bytes(
    optimizer: torch.optim.Optimizer, stepped: Sequence[torch.Tensor] | None = None
) -> int | None:
    """Return the bytes of an optimizer's state on this process; before the first step, to come.

    Measured by a step of the same optimizer, unwrapped, on tensors without storage: `stepped`, or
    else those in its groups. None for other optimizers than torch's and the engine's own.
    """
    if optimizer.state and stepped is None:
        return _tensor_bytes(optimizer)
    if not type(optimizer).__module__.startswith(("torch.optim", "accel.precision")):
        return None
    twin = _twin(optimizer, stepped)
    if isinstance(twin, torch.optim.LBFGS):  # it calls for losses
        return None
    try:
        twin.step()
    except RuntimeError:  # it reads values (Adafactor), which tensors without storage lack
        return None
    return _tensor_bytes(twin)


def _twin(
    optimizer: torch.optim.Optimizer, stepped: Sequence[torch.Tensor] | None
) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind over tensors on the meta device, with gradients."""
    groups = []
    for group in optimizer.param_groups[: 1 if stepped is not None else None]:
        options = {name: group[name] for name in group if name not in ("params", "param_names")}
        options |= dict.fromkeys(_SWITCHES & options.keys(), False)
        groups.append({**options, "params": [_ghost(p) for p in stepped or group["params"]]})
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    defaults |= dict.fromkeys(_SWITCHES & defaults.keys(), False)
    kind: Any = type(optimizer)
    twin: torch.optim.Optimizer = kind(groups, **defaults)
    return twin


def _ghost(parameter: torch.Tensor) -> torch.nn.Parameter:
    part = local(parameter)
    ghost = torch.nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"))
    ghost.grad = torch.empty_like(ghost)
    return ghost


def _tensor_bytes(optimizer: torch.optim.Optimizer) -> int:
    entries = [value for state in optimizer.state.values() for value in state.values()]
    return num_bytes(value for value in entries if isinstance(value, torch.Tensor))
