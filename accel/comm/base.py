"""The interface every transport implements."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from accel.machine.errors import CheckpointError, DiskFullError

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

    def before_exit(self, let_go: Callable[[], None]) -> None:  # noqa: B027 (nothing to let go of)
        """Have `let_go` called when the process ends. Nothing by default.

        It drops what holds the group, asking nothing of other processes. A function, or a method,
        whose object is not kept alive.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete pending work and leave the group; calling it twice is fine."""


# -- many tensors in few collectives: tensors of one dtype and device trave -------------------


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


# -- phases that all ranks go through together: a failure on one raises on  -------------------


@contextlib.contextmanager
def together(comm: Communicator, what: str) -> Iterator[None]:
    """Run a phase; if it failed on any rank, raise `CheckpointError` on all: ranks and errors."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    message = None if own is None else f"{_kind(own)}{own}"
    answers = comm.all_gather_object((message, isinstance(own, DiskFullError)))
    failed = {rank: text for rank, (text, _) in enumerate(answers) if text is not None}
    if not failed:
        return
    if comm.world_size == 1:
        if isinstance(own, CheckpointError):
            raise own
        raise CheckpointError(f"{what} failed: {message}") from own
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    kind = DiskFullError if any(full for _, full in answers) else CheckpointError
    raise kind(f"{what} failed on {len(failed)} of {comm.world_size} ranks. {listed}") from own


def _kind(error: Exception) -> str:
    return "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "


def decided(
    comm: Communicator, decide: Callable[[], str | PathLike[str] | None], what: str
) -> Path | None:
    """Return what rank 0 decides; the disks of other ranks may lag behind."""
    answer: list[str | None] = [None]
    with together(comm, what):
        if comm.rank == 0:
            path = decide()
            answer = [None if path is None else fspath(path)]
    (text,) = comm.broadcast_objects(answer)
    return None if text is None else Path(text)
