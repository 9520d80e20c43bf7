"""Sending the batches that one process reads for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from accel.comm.base import Communicator
from accel.comm.ops import broadcast, send_to_device
from accel.data.batch_layout import Path
from accel.machine.errors import StateError
from accel.machine.tree import flatten, iterate, recursively_apply

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, by which a process receives it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Round:
    """The samples that all processes together compute on at the same time.

    Attributes:
        size: how many samples, those that only complete the round included.
        real: how many samples are no repetitions.
        following: how many samples the next round has; None if this is the last.
        paths: the parts of the batch that have one entry per sample.
    """

    batch: Any
    size: int
    real: int
    following: int | None
    paths: tuple[Path, ...]


def with_next(items: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each item with the one after it; the last with None."""
    current = next(items, None)
    while current is not None:
        following = next(items, None)
        yield current, following
        current = following


def send_round(comm: Communicator, rounds: Iterator[Round], device: torch.device) -> Round | None:
    """Read the next round on the main process and give it to the others.

    A failure to read is sent to them, so that none waits.
    """
    try:
        found = next(rounds, None)
    except Exception as error:
        comm.broadcast_objects([f"{type(error).__name__}: {error}"])
        raise
    if found is None:
        comm.broadcast_objects([None])
        return None
    batch = send_to_device(found.batch, device)
    comm.broadcast_objects([replace(found, batch=recursively_apply(TensorSpec.of, batch))])
    broadcast(list(iterate(batch)))
    return replace(found, batch=batch)


def receive_round(comm: Communicator, device: torch.device) -> Round | None:
    """Take the next round from the main process; `StateError` if it failed to read it."""
    (header,) = comm.broadcast_objects([None])
    if header is None:
        return None
    if isinstance(header, str):
        raise StateError(f"The main process failed to read a batch for all: {header}")
    specs, rebuild = flatten(header.batch, test_type=lambda value: isinstance(value, TensorSpec))
    empty = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    return replace(header, batch=rebuild(broadcast(empty)))
