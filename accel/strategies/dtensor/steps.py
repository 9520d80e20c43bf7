"""Optimizer steps over parameters of several meshes, and of none.

torch's kernels for many tensors at once (``foreach=True``, ``fused=True``) take tensors of one mesh
in a call. Groups stay as the user made them; for the time of a step they are divided by mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SWITCHES = ("foreach", "fused")
Group = dict[str, Any]


def step_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of `optimizer` treat the parameters of one mesh in a call of their own.

    Args:
        optimizer: of torch; what it does to a parameter depends on no other one.
    """
    if not any(group.get(switch) for group in optimizer.param_groups for switch in SWITCHES):
        return
    whole: list[list[Group]] = []

    def restore(own: torch.optim.Optimizer, *_: Any) -> None:
        if whole:
            own.param_groups = whole.pop()

    def divide(own: torch.optim.Optimizer, *_: Any) -> None:
        restore(own)  # a step that failed
        whole.append(own.param_groups)
        own.param_groups = [part for group in own.param_groups for part in _divided(group)]

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(restore)


def _divided(group: Group) -> Iterator[Group]:
    """Yield a group as it is, or if several tensors are treated at once, a part for each mesh."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2 or not any(group.get(switch) for switch in SWITCHES):
        yield group
        return
    for parameters in meshes.values():
        yield {**group, "params": parameters}
