"""One process: collectives of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from accel.comm.base import Communicator, ReduceOp

T = TypeVar("T")


def scaled(total: torch.Tensor, op: ReduceOp, world_size: int, scale: float) -> torch.Tensor:
    """Return the sum, minimum or maximum `total` over ranks as `op` wants it, times `scale`.

    In a mean, integers become floating; a scale of 1.0 leaves the type as it is.
    """
    if op == "mean":
        total = total / world_size
    return total if scale == 1.0 else total * scale


class LocalCommunicator(Communicator):
    """The transport of a run of one process."""

    rank = 0
    local_rank = 0
    world_size = 1
    local_world_size = 1
    backend = None

    def barrier(self) -> None:
        """Return at once."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", scale: float = 1.0
    ) -> torch.Tensor:
        tensor = tensor.detach()
        total = tensor.long() if tensor.dtype == torch.bool else tensor.clone()
        return scaled(total, op, 1, scale)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.detach().clone()

    def broadcast_objects(self, values: Sequence[object], source: int = 0) -> list[Any]:
        return list(values)

    def close(self) -> None:
        """Note the end of the run; there is no group, so collectives continue to work."""
        self.closed = True
