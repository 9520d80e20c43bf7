"""Nested data: lists, tuples and mappings of tensors, walked without losing their types."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch

from accel.machine.errors import ConfigError

T = TypeVar("T")
Test = Callable[[Any], bool]


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor.

    Args:
        value: any object.
    """
    return isinstance(value, torch.Tensor)


def is_namedtuple(value: object) -> bool:
    """Return whether a value is an instance of a named tuple.

    Args:
        value: any object.
    """
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")


def honor_type(original: object, values: Iterable[object]) -> Any:
    """Return values in a sequence of the type of another.

    Args:
        original: a list, tuple, named tuple, ….
        values: as many as a named tuple has fields; any number for the others.
    """
    kind: Callable[..., object] = type(original)
    return kind(*values) if is_namedtuple(original) else kind(values)


def like_mapping(original: Mapping[Any, object], values: dict[Any, object]) -> Any:
    """Return `values` in a mapping of the type of `original` (dict, UserDict, BatchEncoding, …)."""
    if type(original) is dict:
        return values
    if isinstance(original, defaultdict):
        return type(original)(original.default_factory, values)
    if dataclasses.is_dataclass(original):  # a mapping with fields, such as ModelOutput
        return type(original)(**values)
    return type(original)(values)  # type: ignore[call-arg]


def recursively_apply(
    func: Callable[..., object],
    data: object,
    *args: object,
    test_type: Test = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Any:
    """Apply a function to the leaves of nested data.

    Args:
        func: called as ``func(leaf, *args, **kwargs)``.
        data: lists, tuples and mappings of leaves.
        args: handed on to `func`.
        test_type: decides which leaves `func` is applied to.
        error_on_other_type: whether other leaves are an error; else they stay as they are.
        kwargs: handed on to `func`.

    Returns:
        Data of the same structure and types.

    Raises:
        TypeError: for a leaf of another type, where that is an error.
    """

    def walk(node: object) -> object:
        if test_type(node):
            return func(node, *args, **kwargs)
        if isinstance(node, (list, tuple)):
            return honor_type(node, (walk(item) for item in node))
        if isinstance(node, Mapping):
            return like_mapping(node, {key: walk(item) for key, item in node.items()})
        if error_on_other_type:
            raise TypeError(
                f"{type(node).__name__} is not supported here: give nested lists, tuples and "
                f"mappings of values for which {test_type.__name__} holds."
            )
        return node

    return walk(data)


def flatten(
    data: T, test_type: Test = is_tensor, error_on_other_type: bool = False
) -> tuple[list[Any], Callable[[Sequence[object]], T]]:
    """Return the leaves of nested data, and a function that puts new ones into the same structure.

    `test_type` decides which leaves count. With `error_on_other_type`, others are an error; else
    they stay in their place.
    """
    leaves: list[Any] = []
    recursively_apply(
        leaves.append, data, test_type=test_type, error_on_other_type=error_on_other_type
    )

    def rebuild(values: Sequence[object]) -> T:
        remaining = iter(values)
        return recursively_apply(lambda _: next(remaining), data, test_type=test_type)

    return leaves, rebuild


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Write a nested mapping into another, which keeps its other keys.

    Args:
        source: the values that win.
        destination: changed in place.

    Returns:
        `destination`.
    """
    for key, value in source.items():
        if isinstance(value, Mapping):
            below = destination.get(key)
            destination[key] = merge_dicts(value, below if isinstance(below, dict) else {})
        else:
            destination[key] = value
    return destination


def iterate(data: object, test_type: Test = is_tensor) -> Iterator[Any]:
    """Yield the leaves of nested data, in order."""
    if test_type(data):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from iterate(item, test_type)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from iterate(item, test_type)


def split(data: T, rank: int, world_size: int, padding: bool = False) -> T:
    """Return the part of `data` that `rank` gets, in order; the first ranks get the remainder.

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
    if not isinstance(inputs, Mapping):
        is_text = isinstance(inputs, (str, bytes))
        if is_text or not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
            raise ConfigError.of(
                f"split: {type(inputs).__name__}",
                "it takes lists, tuples, tensors, arrays, data sets and dicts of these",
                "Make a list of it.",
            )
        return len(inputs)
    lengths = {key: _common_length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError.of(
            f"split: lengths {lengths}",
            "all values of a dict have one length",
            "Split them one by one.",
        )
    return next(iter(lengths.values()), 0)


def _indices(length: int, rank: int, world_size: int, padding: bool) -> Sequence[int]:
    """Return the indices that `rank` gets, as a range unless there is padding."""
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    indices = range(start, start + size + (1 if rank < extra else 0))
    lacking = size + (1 if extra else 0) - len(indices)
    if not padding or lacking == 0 or length == 0:
        return indices
    return [*indices, *([(indices[-1] if indices else length - 1)] * lacking)]


def _take(inputs: Any, indices: Sequence[int]) -> Any:
    if isinstance(inputs, Mapping):
        return like_mapping(inputs, {key: _take(value, indices) for key, value in inputs.items()})
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # datasets.Dataset
        return inputs.select(list(indices))
    if isinstance(indices, range):
        return inputs[indices.start : indices.stop]
    if hasattr(inputs, "shape"):  # a tensor or an array
        return inputs[list(indices)]
    chosen = [inputs[index] for index in indices]
    return tuple(chosen) if isinstance(inputs, tuple) else chosen
