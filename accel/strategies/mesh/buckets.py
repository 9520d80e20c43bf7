"""Tensors flattened into buckets: one collective or kernel for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch


def grouped(
    tensors: Iterable[torch.Tensor], key: Callable[[torch.Tensor], Hashable]
) -> list[list[torch.Tensor]]:
    """Return `tensors` in groups of equal `key`, in the order of their first members."""
    groups: dict[Hashable, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def apply_in_buckets(
    tensors: Iterable[torch.Tensor], collective: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Apply a collective to `tensors` in place, flattened: once per dtype.

    Args:
        tensors: on one device; as many, and of the same sizes and dtypes, on every rank.
        collective: takes a bucket [n], which it may write into, and returns the result [n].
    """
    for same in grouped(tensors, lambda tensor: tensor.dtype):
        bucket = collective(torch.cat([tensor.detach().reshape(-1) for tensor in same]))
        parts = bucket.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
