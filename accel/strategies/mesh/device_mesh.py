"""The `DeviceMesh` of a run: axes of replicas, of shards, and of split matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.errors import ConfigError, Problem
from accel.strategies.mesh.teardown import forget_meshes

if TYPE_CHECKING:
    from accel.planning.plan import Plan

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"


def build_mesh(plan: Plan, replicate: int, tp_size: int) -> DeviceMesh:
    """Return the mesh; neighbours by rank split matrices. Every rank calls this.

    Args:
        plan: gives device and number of processes.
        replicate: replicas of the model; with 1 there is no axis of that name.
        tp_size: processes that split matrices; with 1 there is no axis of that name.
    """
    forget_meshes()
    axes = {REPLICATE: replicate, SHARD: plan.world_size // tp_size // replicate, TENSOR: tp_size}
    kept = {name: size for name, size in axes.items() if size > 1 or name == SHARD}
    return init_device_mesh(plan.device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh over which gradients are averaged."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def check_given(mesh: DeviceMesh, own: DeviceMesh) -> None:
    """Raise unless a user's mesh splits matrices over the same processes as ours.

    Raises:
        ConfigError: if it does not.
    """
    if TENSOR not in (own.mesh_dim_names or ()):
        return
    theirs, ours = mesh[TENSOR].get_group(), own[TENSOR].get_group()
    if dist.get_process_group_ranks(theirs) != dist.get_process_group_ranks(ours):
        raise ConfigError(
            Problem(
                "TorchTensorParallelPlugin.torch_device_mesh",
                "matrices are split over neighbours by rank",
                "Make 'tp' the last axis of the mesh, or leave it out.",
            )
        )
