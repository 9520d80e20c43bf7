"""Nested data: lists, tuples and mappings of tensors, walked without losing their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel.errors import ConfigError, Problem


def split(data: Any, rank: int, world_size: int, padding: bool = False) -> Any:
    """Return the part of `data` that `rank` gets, in order; the first ranks get what is left over.

    Args:
        data: a list, tuple, tensor, array, `datasets.Dataset`, or a mapping of such, all of one
            length.
        rank: index of the part.
        world_size: number of parts.
        padding: whether shorter parts are completed with the last element, so that all have one
            length.

    Returns:
        The part, of the same type; `data` itself where there is one part.

    Raises:
        ConfigError: if the values of a mapping differ in length, or `data` cannot be split.
    """
    if world_size == 1:
        return data
    return _take(data, _indices(_common_length(data), rank, world_size, padding))


def _common_length(inputs: Any) -> int:
    """Return the length of `inputs`, or of all values of a dict."""
    if not isinstance(inputs, Mapping):
        if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
            raise ConfigError(
                Problem(
                    f"split: {type(inputs).__name__}",
                    "it takes lists, tuples, tensors, arrays and dicts of these",
                    "Make a list of it.",
                )
            )
        return len(inputs)
    lengths = {key: _common_length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            Problem(
                f"split: lengths {lengths}",
                "all values of a dict have one length",
                "Split them one by one.",
            )
        )
    return next(iter(lengths.values()), 0)


def _indices(length: int, rank: int, world_size: int, padding: bool) -> Sequence[int]:
    """Return the indices that `rank` gets, as a range unless there is padding."""
    share, extra = divmod(length, world_size)
    start = rank * share + min(rank, extra)
    indices = range(start, start + share + (1 if rank < extra else 0))
    lacking = share + (1 if extra else 0) - len(indices)
    if not padding or lacking == 0 or length == 0:
        return indices
    return [*indices, *([(indices[-1] if indices else length - 1)] * lacking)]


def _take(inputs: Any, indices: Sequence[int]) -> Any:
    """Return the elements of `inputs` at `indices`, in a container of the same type."""
    if isinstance(inputs, Mapping):
        return _like(inputs, {key: _take(value, indices) for key, value in inputs.items()})
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # datasets.Dataset
        return inputs.select(list(indices))
    if isinstance(indices, range):
        return inputs[indices.start : indices.stop]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(inputs[index] for index in indices)
    return inputs[list(indices)]


def _like(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    return values if type(original) is dict else type(original)(values)  # type: ignore[call-arg]
