"""The interface every transport implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]


class Communicator(ABC):
    """The transport between the processes of a run.

    Tensors that go in stay as they are; results are new tensors on the same device. A collective
    returns when its result may be used on the current stream. Every rank must make the same calls
    in the same order.

    Attributes:
        rank: index of this process among all.
        local_rank: index of this process on its node.
        world_size: number of processes.
        local_world_size: number of processes on this node.
        backend: name of the backend ("gloo", "nccl"), None for one process.
        closed: whether `close` was called.
        debug: whether operations check shapes over ranks first.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    backend: str | None
    closed: bool = False
    debug: bool = False

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors of shape [n, ...] joined along dim 0: [world_size * n, ...]."""

    @abstractmethod
    def all_gather_object(self, value: T) -> list[T]:
        """Return each rank's picklable `value`, by rank."""

    @abstractmethod
    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", scale: float = 1.0
    ) -> torch.Tensor:
        """Return the elementwise reduction over ranks, times `scale`."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return rank `source`'s tensor; others give one of its shape and dtype."""

    @abstractmethod
    def broadcast_objects(self, values: Sequence[object], source: int = 0) -> list[Any]:
        """Return rank `source`'s list of picklable values; others give a list of its length."""

    @abstractmethod
    def post(self, key: str, value: str) -> None:
        """Leave `value` under `key` for the other ranks. No collective: it waits for nobody."""

    @abstractmethod
    def posted(self, key: str) -> list[str] | None:
        """Return what the ranks have posted under `key`, by rank; None until all of them have."""

    def flush(self) -> None:  # noqa: B027 (eager transports have nothing to wait for)
        """Wait until work that was only queued (lazy backends) is done. Nothing by default."""

    def before_exit(self, let_go: Callable[[], None]) -> None:  # noqa: B027 (nothing to let go of)
        """Have `let_go` called when the process ends. Nothing by default.

        It drops what holds the group, asking nothing of other processes. A function, or a method,
        whose object is not kept alive.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete pending work and leave the group; calling it twice is fine."""
