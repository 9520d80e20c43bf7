"""Tensors of which each process holds a part: made whole, and taken apart.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def whole(value: Any) -> Any:
    """Return a tensor whole and in the host's memory; other values as they are.

    Collective for a DTensor: every rank of its mesh calls it.
    """
    if not isinstance(value, DTensor):
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value
    mesh, local = value.device_mesh, _local(value)
    if local.device.type != mesh.device_type:  # offloaded: the mesh talks on its own device
        value = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return cast("DTensor", value.detach()).full_tensor().cpu()


def _local(value: DTensor) -> torch.Tensor:
    return value.to_local().detach()


def part_like(value: torch.Tensor, target: DTensor) -> DTensor:
    """Return this rank's part of a whole tensor, split and placed as `target`; no communication.

    Args:
        value: [...] of the shape of `target`; its dtype is kept.
        target: gives mesh, placements and device.
    """
    mesh, placements = target.device_mesh, target.placements
    sizes, offsets = compute_local_shape_and_global_offset(target.shape, mesh, placements)
    mine = value.detach()
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        mine = mine.narrow(dim, min(offset, mine.shape[dim]), size)
    mine = mine.to(target.to_local().device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def fitted(value: Any, target: torch.Tensor | None) -> Any:
    """Return `value` as a part where it is of the shape of a `target` that is split."""
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor):
        return value
    split = not isinstance(value, DTensor) and value.shape == target.shape and value.dim() > 0
    return part_like(value, target) if split else value


def fitted_weight(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Return the part of a whole weight; of another shape it stays, for torch to name it."""
    if isinstance(target, DTensor) and value.shape == target.shape:
        return part_like(value, target)
    return value


def all_whole(value: Any) -> Any:
    """Return nested dicts, lists and tuples with every tensor `whole`."""
    if isinstance(value, dict):
        return {key: all_whole(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(all_whole(entry) for entry in value)
    return whole(value)


def parts_of(entry: Any, target: torch.Tensor | None) -> Any:
    """Return an optimizer's state of one parameter, in parts where `target` is split."""
    if not isinstance(entry, dict):
        return fitted(entry, target)
    return {name: fitted(value, target) for name, value in entry.items()}
