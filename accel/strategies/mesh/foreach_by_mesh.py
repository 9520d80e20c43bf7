"""Optimizer steps over plain parameters and parameters of several meshes.

torch's kernels for several tensors (``foreach``, ``fused``) take tensors of one mesh in a call, and
where neither flag is set, torch chooses ``foreach`` by default on GPUs. Parameter groups stay as
the user made them; during a step they are split by mesh. Values that an optimizer writes into the
split groups (a count of steps, say) are written into the original group afterwards.

Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel.machine.errors import ConfigError

MISSING = object()
Group = dict[str, Any]
# Optimizers with these hooks already: one may be prepared again.
_split_by_mesh: WeakSet[torch.optim.Optimizer] = WeakSet()


def step_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an elementwise optimizer of torch call torch's kernels once per mesh."""
    if optimizer in _split_by_mesh or not any(map(_is_foreach, optimizer.param_groups)):
        return
    _split_by_mesh.add(optimizer)
    saved: list[tuple[list[Group], list[list[Group]]]] = []

    def restore(own: torch.optim.Optimizer, *_: object) -> None:
        if saved:  # hooks are called twice where a subclass calls its parent's step
            own.param_groups, splits = saved.pop()
            for group, parts in zip(own.param_groups, splits, strict=True):
                _merge(group, parts)

    def split(own: torch.optim.Optimizer, *_: object) -> None:
        restore(own)  # a parent's step, or one after a step that failed
        splits = [list(_by_mesh(group)) for group in own.param_groups]
        saved.append((own.param_groups, splits))
        own.param_groups = [part for parts in splits for part in parts]

    optimizer.register_step_pre_hook(split)
    optimizer.register_step_post_hook(restore)


def _is_foreach(group: Group) -> bool:
    """Return whether torch updates a group by kernels for several tensors, or may choose to."""
    foreach, fused = group.get("foreach", False), group.get("fused")
    return bool(foreach or fused or (foreach is None and fused is None))


def _merge(group: Group, parts: list[Group]) -> None:
    """Write into a group the values that a step wrote into its parts."""
    for key in dict.fromkeys(key for part in parts for key in part if key != "params"):
        first, *others = (part.get(key, MISSING) for part in parts)
        if any(not _same(first, other) for other in others):
            raise ConfigError.of(
                f"an optimizer that wrote {key}={first!r} and other values into one group",
                "its step updates the parameters of each mesh in a separate call (the last one "
                "may have failed between them), and a group has one value",
                "Build the optimizer with foreach=False and fused=False, or give sharded and "
                "replicated parameters separate groups.",
            )
        group[key] = first


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


def _by_mesh(group: Group) -> Iterator[Group]:
    """Yield a group unchanged, or if torch may update it by ``foreach``, a part for each mesh."""
    meshes: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2 or not _is_foreach(group):
        yield group
        return
    for parameters in meshes.values():
        yield {**group, "params": parameters}
