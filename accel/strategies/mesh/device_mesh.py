"""The `DeviceMesh` of a run: built from its parallel dimensions, checked, destroyed.

A process group lives on in whatever holds its object, and gloo's threads live as long as it does: a
process that trains again and again collects them, and one that ends with any of them may abort.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.machine.errors import ConfigError, StateError
from accel.plan.dims import DP_SHARD, TP, ParallelDims, gradient_axes
from accel.strategies.mesh.torch_internals import (
    clear_mesh_caches,
    clear_process_groups,
    mesh_infos,
)


def build_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """Return the mesh of the parallel dimensions. Every rank calls this.

    An axis of size 1 is no axis of the mesh, but for dp_shard.
    """
    axes = {name: dims.size(name) for name in dims.order}
    kept = {name: size for name, size in axes.items() if size > 1 or name == DP_SHARD}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def joined(dims: ParallelDims) -> ParallelDims:
    """Return the dimensions in which context-parallel ranks are ranks that shard the model."""
    return dataclasses.replace(dims, dp_shard=dims.dp_shard * dims.cp, cp=1)


def gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh over which gradients are averaged."""
    names = gradient_axes(mesh.mesh_dim_names or ())
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def check_given(given: DeviceMesh, own: DeviceMesh) -> None:
    """Raise unless the tensor-parallel ranks of a user's mesh are those of ours."""
    if TP not in (own.mesh_dim_names or ()):
        return
    theirs, ours = given[TP].get_group(), own[TP].get_group()
    if dist.get_process_group_ranks(theirs) != dist.get_process_group_ranks(ours):
        raise ConfigError.of(
            "TorchTensorParallelPlugin.torch_device_mesh",
            "tensor-parallel ranks are consecutive",
            "Make 'tp' the last axis of the mesh, or omit torch_device_mesh.",
        )


def _refuse_forward(*_: object) -> NoReturn:
    raise StateError(
        "The process group was destroyed by end_training(), so that sharded parameters can no "
        "longer be gathered. Train, evaluate and save before it, or build a new Accelerator() "
        "on every process."
    )


def destroy_mesh(
    built: Iterable[DeviceMesh], models: Sequence[torch.nn.Module], groups_exist: bool = True
) -> None:
    """Destroy the process groups of meshes, but for the default one, and drop references to them.

    Every rank calls this, with no collective under way. `models` are distributed over a mesh, and
    refuse further forward passes; `groups_exist` is false if the groups were destroyed with the
    default group.
    """
    infos = list(mesh_infos(models))
    meshes = {id(known): known for known in (*built, *(info.mesh for info in infos))}
    groups: dict[int, dist.ProcessGroup] = {}
    if groups_exist:
        groups = {id(group): group for known in meshes.values() for group in known.get_all_groups()}
    for info in infos:
        for name, value in vars(info).items():
            if isinstance(value, dist.ProcessGroup):
                setattr(info, name, None)
    for model in models:
        if any(True for _ in mesh_infos([model])):
            model.register_forward_pre_hook(_refuse_forward, prepend=True)
    for group in groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for known in meshes.values():
        clear_process_groups(known)
    clear_mesh_caches()
