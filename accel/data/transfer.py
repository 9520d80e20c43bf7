"""Joining, cutting and sending the batches that one process reads for all."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from accel.comm.base import Communicator
from accel.errors import ConfigError, Problem, StateError
from accel.ops import broadcast, send_to_device
from accel.tree import (
    flatten,
    honor_type,
    is_namedtuple,
    iterate,
    like_mapping,
    recursively_apply,
)

T = TypeVar("T")
SliceFunction = Callable[..., Any]


@dataclass(frozen=True)
class TensorSpec:
    """What a process must know of a tensor to receive it."""

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
        batch: nested data of `size` samples.
        size: how many samples, those that only complete the round included.
        real: how many samples are no repetitions.
        following: how many samples the next round has; None if this is the last.
    """

    batch: Any
    size: int
    real: int
    following: int | None


def with_next(items: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each item with the one after it; the last with None."""
    current = next(items, None)
    while current is not None:
        following = next(items, None)
        yield current, following
        current = following


def is_plain_sequence(value: Any) -> bool:
    """Tell whether `value` lists one plain object per sample (strings, numbers)."""
    return (
        isinstance(value, (list, tuple))
        and not is_namedtuple(value)
        and not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)
    )


def has_samples(value: Any) -> bool:
    """Tell whether `value` has one entry per sample: a tensor [B, ...], a list of plain objects."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    return is_plain_sequence(value) and len(value) > 0


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a container with their keys, None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)) and not is_plain_sequence(value):
        return list(enumerate(value))
    return None


def _rebuilt(value: Any, entries: list[Any]) -> Any:
    """Return a container like `value` that holds `entries`."""
    if isinstance(value, Mapping):
        return like_mapping(value, dict(zip(value, entries, strict=True)))
    return honor_type(value, entries)


def batch_length(batch: Any) -> int:
    """Return the number of samples of nested data.

    Raises:
        ConfigError: if nothing in it has a length.
    """
    found = next((len(part) for part in iterate(batch, has_samples)), None)
    if found is None:
        raise ConfigError(
            Problem(
                f"dispatch_batches=True with a batch of type {type(batch).__name__}",
                "it holds a tensor or a list with one entry per sample",
                "Return such from `collate_fn`, or set dispatch_batches=False.",
            )
        )
    return found


def slice_batch(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Return the samples of nested data in `tensor_slice`.

    Args:
        data: tensors [B, ...] and lists of B plain objects; anything else is kept whole.
        tensor_slice: which samples.
        process_index: not needed; custom slice functions get it.
        num_processes: not needed; custom slice functions get it.
    """
    return recursively_apply(operator.itemgetter(tensor_slice), data, test_type=has_samples)


def join_batches(batches: list[Any]) -> Any:
    """Return nested data with the samples of all `batches`, in order.

    Raises:
        ConfigError: if they hold something that is neither joined nor the same in all.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(batches)
    parts = _parts(first)
    if parts is not None:
        return _rebuilt(
            first, [join_batches([batch[key] for batch in batches]) for key, _ in parts]
        )
    if is_plain_sequence(first):
        return type(first)(itertools.chain.from_iterable(batches))
    if any(not bool(other == first) for other in batches[1:]):
        raise ConfigError(
            Problem(
                f"dispatch_batches=True with batches that hold different {type(first).__name__}s",
                "what is no tensor or list is the same in the batches that are read together",
                "Make it a tensor with one entry per sample, or set split_batches=True.",
            )
        )
    return first


def complete(batch: Any, size: int, first: Any, multiple: int) -> tuple[Any, int]:
    """Complete `batch` with samples of `first` to a multiple of `multiple`.

    Returns:
        The batch and its new size.
    """
    missing = -size % multiple
    if missing == 0:
        return batch, size
    available = batch_length(first)
    repeats = -(-missing // available)
    filler = slice_batch(join_batches([first] * repeats), slice(0, missing))
    return join_batches([batch, filler]), size + missing


def send_round(comm: Communicator, rounds: Iterator[Round], device: torch.device) -> Round | None:
    """Read the next round on the main process and give it to the others.

    A failure to read is told to them, so that nobody waits.
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
    """Take the next round from the main process.

    Raises:
        StateError: if the main process failed to read it.
    """
    (header,) = comm.broadcast_objects([None])
    if header is None:
        return None
    if isinstance(header, str):
        raise StateError(f"The main process failed to read a batch for all: {header}")
    specs, rebuild = flatten(header.batch, test_type=lambda value: isinstance(value, TensorSpec))
    empty = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    return replace(header, batch=rebuild(broadcast(empty)))
