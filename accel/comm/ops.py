"""Operations on nested tensors across processes, named as documented.

Nested data travels in one collective per dtype: leaves are joined, exchanged and taken apart again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from accel.comm.base import Communicator, ReduceOp, exchange_flat
from accel.machine.errors import ConfigError, DistributedOperationException, unknown_choice
from accel.machine.tree import (
    flatten,
    honor_type,
    is_tensor,
    iterate,
    like_mapping,
    recursively_apply,
)
from accel.state import PartialState

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Device = torch.device | str | int
REDUCTIONS = ("mean", "sum", "min", "max", "none")
LOW_PRECISION = (torch.float16, torch.bfloat16)


# -- debug mode ------------------------------------------------------------------------------


def _shapes(data: object) -> object:
    """Return shapes and types of the leaves, in the structure of `data`, as plain containers."""
    if is_tensor(data):
        return f"{list(data.shape)} {str(data.dtype).removeprefix('torch.')}"
    if isinstance(data, (list, tuple)):
        return [_shapes(item) for item in data]
    if isinstance(data, Mapping):
        return {key: _shapes(item) for key, item in data.items()}
    return type(data).__name__


def _dims(data: object) -> object:
    return recursively_apply(lambda tensor: f"{tensor.ndim} dims", data)


def _check_agreement(comm: Communicator, name: str, call: str, description: object) -> None:
    """Raise on every rank unless all of them make the same call with data of one description."""
    everywhere = comm.all_gather_object((call, description))
    if all(other == everywhere[0] for other in everywhere):
        return
    same_call = all(other[0] == call for other in everywhere)
    lines = [
        f"  rank {rank}: {shape if same_call else f'{other} of {shape}'}"
        for rank, (other, shape) in enumerate(everywhere)
    ]
    raise DistributedOperationException(
        "\n".join(
            (
                f"{name}: ranks disagree on what they exchange. Shapes and types are",
                *lines,
                "Make them equal, for example with pad_across_processes."
                if same_call
                else "Make the same calls in the same order on every process.",
            )
        )
    )


def _verified(
    describe: Callable[[Any], object],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an operation so that in debug mode ranks first compare call and `describe(data)`."""

    def decorate(operation: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(operation)

        @functools.wraps(operation)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            state = PartialState()
            if state.num_processes > 1 and state.debug:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                data, *options = bound.arguments.items()
                settings = ", ".join(f"{key}={value!r}" for key, value in options)
                call = f"{operation.__name__}({settings})"
                _check_agreement(state.comm, operation.__name__, call, describe(data[1]))
            return operation(*args, **kwargs)

        return checked

    return decorate


# -- collectives -----------------------------------------------------------------------------


@_verified(_shapes)
def gather(tensor: T) -> T:
    """Gather nested tensors from all processes.

    Ranks do not compare shapes before each call, which would take about as long as it does. Other
    shapes end in an error of the backend, or (gloo) abort a rank; with `ACCELERATE_DEBUG_MODE=1`
    they are named.

    Args:
        tensor: nested lists, tuples and mappings of tensors [n, ...], of the same shapes on every
            rank: see `pad_across_processes`. A scalar counts as [1].

    Returns:
        The same structure of tensors [world_size * n, ...], by rank, on every rank; `tensor` itself
        in a run of one process.

    Raises:
        TypeError: for a leaf that is no tensor.
        DistributedOperationException: in debug mode, if ranks disagree on the shapes.
    """
    comm = PartialState().comm
    if comm.world_size == 1:
        return tensor
    leaves, rebuild = flatten(tensor, error_on_other_type=True)
    leaves = [leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in leaves]
    empty = [leaf.new_empty((comm.world_size * leaf.shape[0], *leaf.shape[1:])) for leaf in leaves]
    full = [index for index, leaf in enumerate(leaves) if leaf.numel()]
    gathered = exchange_flat([leaves[index] for index in full], comm.all_gather)
    for index, answer in zip(full, gathered, strict=True):
        empty[index] = answer.flatten(0, 1)
    return rebuild(empty)


@_verified(lambda _: "objects")
def gather_object(object: Any) -> Any:
    """Gather picklable values from all processes.

    Args:
        object: a list or tuple, whose elements are joined over ranks, or one value per rank.

    Returns:
        The list of elements by rank, on every rank; `object` itself in a run of one process.
    """
    several = isinstance(object, (list, tuple))
    comm = PartialState().comm
    if comm.world_size == 1:
        return object
    values = comm.all_gather_object(object)
    return [item for value in values for item in value] if several else values


@_verified(_shapes)
def broadcast(tensor: T, from_process: int = 0) -> T:
    """Give every process the nested tensors of one of them.

    Args:
        tensor: nested tensors; of the same shapes and types on every rank.
        from_process: index of the process that gives them.

    Returns:
        The same structure with that process's values.
    """
    comm = PartialState().comm
    if comm.world_size == 1:
        return tensor
    leaves, rebuild = flatten(tensor, error_on_other_type=True)
    received = exchange_flat(leaves, functools.partial(comm.broadcast, source=from_process))
    return rebuild([answer[0] for answer in received])


@_verified(lambda objects: f"{len(objects)} objects")
def broadcast_object_list(object_list: list[T], from_process: int = 0) -> list[T]:
    """Replace the elements of a list by those of one process, in place.

    Args:
        object_list: picklable values; of the same length on every rank.
        from_process: index of the process that gives them.

    Returns:
        `object_list`.
    """
    comm = PartialState().comm
    if comm.world_size > 1:
        object_list[:] = comm.broadcast_objects(object_list, from_process)
    return object_list


@_verified(_shapes)
def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """Reduce nested tensors over all processes, element by element.

    Args:
        tensor: nested tensors; of the same shapes on every rank.
        reduction: mean, sum, min, max, or none, which leaves each process its own values.
        scale: factor of the result.

    Returns:
        The same structure of new tensors. A mean of integers is floating.

    Raises:
        ConfigError: for another `reduction`.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(unknown_choice("reduction", reduction, REDUCTIONS))
    leaves, rebuild = flatten(tensor, error_on_other_type=True)
    if reduction == "none":
        return rebuild([leaf * scale for leaf in leaves])
    op = cast(ReduceOp, reduction)
    exchange = functools.partial(PartialState().comm.all_reduce, op=op, scale=scale)
    return rebuild([answer[0] for answer in exchange_flat(leaves, exchange)])


@_verified(_dims)
def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Pad nested tensors to the largest size over all processes, so that they can be gathered.

    Args:
        tensor: nested tensors, of as many dims on every rank.
        dim: the dimension to pad; tensors without it stay as they are.
        pad_index: value of the padding.
        pad_first: whether the padding comes before the values.

    Returns:
        The same structure of tensors.
    """
    comm = PartialState().comm
    leaves, rebuild = flatten(tensor, error_on_other_type=True)
    if comm.world_size == 1 or not leaves:
        return tensor
    own = [leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1 for leaf in leaves]
    largest = comm.all_reduce(torch.tensor(own), op="max").tolist()
    return rebuild(
        [
            leaf if size == most else _pad(leaf, dim % leaf.ndim, most, pad_index, pad_first)
            for leaf, size, most in zip(leaves, own, largest, strict=True)
        ]
    )


def _pad(tensor: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    start = size - tensor.shape[dim] if first else 0
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded


def wait_for_everyone() -> None:
    """Wait until every process is here. All of them have to call it."""
    PartialState().wait_for_everyone()


# -- local operations ------------------------------------------------------------------------


def send_to_device(
    tensor: T,
    device: Device,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> T:
    """Move nested tensors to a device.

    Args:
        tensor: nested lists, tuples and mappings; whatever has a `to` method is moved with it,
            other values stay as they are.
        device: where to.
        non_blocking: whether the copy overlaps with computation (wants pinned memory).
        skip_keys: keys of mappings whose values stay where they are.

    Returns:
        The same structure.
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _move(tensor, device, non_blocking, skipped)


def _move(node: Any, device: Device, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(node, torch.Tensor):
        return node.to(device, non_blocking=non_blocking)
    kind = type(node)
    if kind is list or kind is tuple:
        return kind([_move(item, device, non_blocking, skipped) for item in node])
    if isinstance(node, Mapping) and (kind is dict or skipped or not hasattr(node, "to")):
        moved = {
            key: item if key in skipped else _move(item, device, non_blocking, skipped)
            for key, item in node.items()
        }
        return like_mapping(node, moved)
    if hasattr(node, "to"):  # BatchEncoding, PackedSequence, TensorDict, …
        return _move_itself(node, device, non_blocking)
    if isinstance(node, (list, tuple)):
        return honor_type(node, (_move(item, device, non_blocking, skipped) for item in node))
    return node


def _move_itself(node: Any, device: Device, non_blocking: bool) -> Any:
    try:
        return node.to(device, non_blocking=non_blocking)
    except TypeError:  # a `to` that knows no such argument
        return node.to(device)


def slice_tensors(
    data: T,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> T:
    """Take a slice of nested tensors.

    Args:
        data: nested tensors [n, ...].
        tensor_slice: the slice of dim 0.
        process_index, num_processes: for slicing functions of the user's own; not used.

    Returns:
        The same structure.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join nested tensors of one structure along a dimension.

    Args:
        data: what to join, each nested in the same way.
        dim: the dimension.

    Returns:
        One such structure.

    Raises:
        ConfigError: if there is nothing to join.
        TypeError: for a leaf that is no tensor.
    """
    if not data:
        raise ConfigError.of(
            f"concatenate({data!r})", "there is nothing to join", "Give at least one element."
        )
    first = data[0]
    if isinstance(first, (list, tuple)):
        columns = zip(*data, strict=True)
        return honor_type(first, (concatenate(column, dim) for column in columns))
    if isinstance(first, Mapping):
        joined = {key: concatenate([item[key] for item in data], dim) for key in first}
        return like_mapping(first, joined)
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"concatenate joins tensors, not {type(first).__name__}.")
    return torch.cat(list(data), dim=dim)


def listify(data: Any) -> Any:
    """Turn the tensors of nested data into Python numbers, and lists of them.

    Args:
        data: nested tensors; other leaves stay as they are.

    Returns:
        The same structure.
    """
    return recursively_apply(lambda tensor: tensor.tolist(), data)


def find_batch_size(data: object) -> int:
    """Return the size of dim 0 of the first tensor in nested data.

    Args:
        data: nested tensors; scalars are passed over.

    Raises:
        TypeError: if there is no tensor with a dim.
    """
    for tensor in iterate(data):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise TypeError(
        f"There is no tensor in this {type(data).__name__} to take the batch size from."
    )


def _is_low_precision(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION


def convert_to_fp32(tensor: Any) -> Any:
    """Turn the fp16 and bf16 tensors of nested data into fp32.

    Args:
        tensor: nested tensors; other leaves stay as they are.

    Returns:
        The same structure.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_low_precision)


class ConvertOutputsToFp32(Generic[P, R]):
    """Converts the outputs of a function to fp32. It can be pickled if the function can.

    Args:
        model_forward: the function.
    """

    def __init__(self, model_forward: Callable[P, R]) -> None:
        functools.update_wrapper(self, model_forward)
        self.model_forward = model_forward

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[P, R]) -> Callable[P, R]:
    """Return a function like another, with its outputs turned into fp32.

    Args:
        model_forward: the function; it can be pickled afterwards if it can now.
    """
    return ConvertOutputsToFp32(model_forward)
