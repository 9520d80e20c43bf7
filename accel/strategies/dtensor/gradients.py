"""Norms of gradients of which each process holds a part.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def gradient_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm [] of all gradients, each element counted once over all ranks.

    Args:
        gradients: DTensors and plain tensors (which are the same on all ranks that share a mesh).
        norm_type: order of the norm; infinity for the largest magnitude.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        key: Any = None
        local = gradient
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = _summed(gradient)
            split = [not p.is_replicate() for p in gradient.placements]
            axes = tuple(axis for axis, is_split in enumerate(split) if is_split)
            key, local = (gradient.device_mesh, axes), gradient.to_local()
        kinds.setdefault(key, []).append(local)
    norms = [_reduced_norm(key, locals_, norm_type) for key, locals_ in kinds.items()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _summed(gradient: DTensor) -> DTensor:
    """Return a gradient of which ranks hold summands as one that each of them holds."""
    final = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=final)


def _reduced_norm(key: Any, tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    device = torch.device(key[0].device_type) if key else tensors[0].device
    norm = torch.zeros((), device=device)
    if present:
        norm = torch.nn.utils.get_total_norm(present, norm_type).to(device)
    if key is None:
        return norm
    mesh, axes = key
    largest = math.isinf(norm_type)
    power = norm if largest else norm**norm_type
    for axis in axes:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(power, op=op, group=mesh.get_group(axis))
    return power if largest else power ** (1.0 / norm_type)
