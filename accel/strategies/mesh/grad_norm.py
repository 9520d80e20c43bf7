"""Norms of gradients of which each process holds a part.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from accel.memory_estimate import local


def gradient_norm(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm [] of all gradients, each element counted once over all ranks.

    It is in fp32, or fp64 where parameters are. A rank without a gradient takes part: others wait
    for it.

    Args:
        parameters: DTensors and plain tensors (which are the same on all ranks that share a mesh);
            at least one.
        norm_type: order of the norm; infinity for the largest magnitude.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    # Ranks meet in one dtype, also those that hold nothing of what the others do.
    dtypes = (parameter.dtype.to_real() for parameter in parameters)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            gradient = _summed(gradient)
        spread = parameter if gradient is None else gradient
        key: Any = parameter.device if not isinstance(spread, DTensor) else _key(spread)
        found = kinds.setdefault(key, [])
        if gradient is not None:
            found.append(local(gradient))
    norms = [_reduced_norm(key, found, norm_type, dtype) for key, found in kinds.items()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _key(tensor: DTensor) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh of `tensor`, and the axes of it that it is cut along."""
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tensor.device_mesh, tuple(cut)


def _summed(gradient: DTensor) -> DTensor:
    """Return a gradient of which ranks hold summands as one that each of them holds."""
    final = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=final)


def _reduced_norm(
    key: Any, tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    device = key if isinstance(key, torch.device) else torch.device(key[0].device_type)
    norm = torch.zeros((), device=device, dtype=dtype)
    if present:
        norm = torch.nn.utils.get_total_norm(present, norm_type).to(device, dtype)
    if isinstance(key, torch.device):
        return norm
    mesh, axes = key
    largest = math.isinf(norm_type)
    power = norm if largest else norm**norm_type
    for axis in axes:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(power, op=op, group=mesh.get_group(axis))
    return power if largest else power ** (1.0 / norm_type)
