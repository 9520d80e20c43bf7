"""Optimizer steps over parameters of several meshes, and of none.

torch's kernels for many tensors at once (``foreach``, ``fused``) take tensors of one mesh in a
call, and where neither switch is set, torch chooses ``foreach`` by itself on GPUs. Groups stay as
the user made them; for the time of a step they are divided by mesh. What an optimizer writes into
the parts (a count of steps, say) goes into the whole group afterwards.

Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from accel.errors import ConfigError, Problem

MISSING = object()
Group = dict[str, Any]
# Optimizers that divide their groups already: one may be prepared again.
_dividing: WeakSet[torch.optim.Optimizer] = WeakSet()


def step_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of `optimizer` treat the parameters of one mesh in a call of their own.

    Args:
        optimizer: of torch; what it does to a parameter depends on no other one.
    """
    if optimizer in _dividing or not any(map(_is_joint, optimizer.param_groups)):
        return
    _dividing.add(optimizer)
    divided: list[tuple[list[Group], list[list[Group]]]] = []

    def restore(own: torch.optim.Optimizer, *_: Any) -> None:
        if divided:  # hooks are called twice where a subclass calls its parent's step
            own.param_groups, parts = divided.pop()
            for group, its_parts in zip(own.param_groups, parts, strict=True):
                _take_over(group, its_parts)

    def divide(own: torch.optim.Optimizer, *_: Any) -> None:
        restore(own)  # a parent's step, or one after a step that failed
        parts = [list(_divided(group)) for group in own.param_groups]
        divided.append((own.param_groups, parts))
        own.param_groups = [part for group in parts for part in group]

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(restore)


def _is_joint(group: Group) -> bool:
    """Return whether torch treats several tensors of a group at once, or may choose to."""
    foreach, fused = group.get("foreach", False), group.get("fused")
    return bool(foreach or fused or (foreach is None and fused is None))


def _take_over(group: Group, parts: list[Group]) -> None:
    """Write into a group what a step wrote into all its parts.

    Raises:
        ConfigError: if it wrote different values.
    """
    for key in dict.fromkeys(key for part in parts for key in part if key != "params"):
        first, *others = (part.get(key, MISSING) for part in parts)
        if any(not _same(first, other) for other in others):
            raise ConfigError(
                Problem(
                    f"an optimizer that wrote {key}={first!r} and other values into one group",
                    "its step treats the parameters of each mesh in a call of their own (the last "
                    "one may have failed between them), and a group has one value",
                    "Build the optimizer with foreach=False and fused=False, or give split "
                    "parameters and whole ones groups of their own.",
                )
            )
        group[key] = first


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


def _divided(group: Group) -> Iterator[Group]:
    """Yield a group as it is, or if several tensors are treated at once, a part for each mesh."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2 or not _is_joint(group):
        yield group
        return
    for parameters in meshes.values():
        yield {**group, "params": parameters}
