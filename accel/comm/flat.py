"""Many tensors in few collectives: tensors of one dtype and device travel as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

Exchange = Callable[[torch.Tensor], torch.Tensor]


def by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype and device, in the order of the first."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.device].append(index)
    return list(groups.values())


def exchange_flat(tensors: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Exchange tensors between ranks, with one call for each dtype and device.

    Args:
        tensors: of any shapes; on every rank of the same shapes, dtypes and order.
        exchange: takes [n] and returns [k * n], the answers of k ranks by rank.

    Returns:
        For each tensor [...], its answers [k, ...].
    """
    answers: dict[int, torch.Tensor] = {}
    for indices in by_dtype(tensors):
        parts = [tensors[index].detach().reshape(-1) for index in indices]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        answer = exchange(flat)
        ranks = answer.numel() // flat.numel() if flat.numel() else 1
        sizes = [part.numel() for part in parts]
        for index, part in zip(indices, answer.view(ranks, -1).split(sizes, dim=1), strict=True):
            answers[index] = part.reshape(ranks, *tensors[index].shape)
    return [answers[index] for index in range(len(tensors))]
