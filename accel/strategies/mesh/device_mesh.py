"""The `DeviceMesh` of a run: replicate, shard and tensor-parallel axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.errors import ConfigError, Problem
from accel.parallel import DP_REPLICATE, DP_SHARD, TP, gradient_axes
from accel.strategies.mesh.teardown import forget_meshes

if TYPE_CHECKING:
    from accel.planning.plan import Plan

REPLICATE, SHARD, TENSOR = DP_REPLICATE, DP_SHARD, TP


def build_mesh(plan: Plan) -> DeviceMesh:
    """Return the mesh of the plan's parallel dimensions. Every rank calls this.

    Args:
        plan: gives the device and the dimensions; of an axis of size 1 there is none on the mesh,
            but for the shard axis.
    """
    forget_meshes()
    dims = plan.parallel_dims
    axes = {name: dims.size(name) for name in dims.order}
    kept = {name: size for name, size in axes.items() if size > 1 or name == SHARD}
    return init_device_mesh(plan.device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh over which gradients are averaged."""
    names = gradient_axes(mesh.mesh_dim_names or ())
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
