"""Memory of the device: give it back, and find a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

R = TypeVar("R")
# What torch says in a plain RuntimeError where it has no OutOfMemoryError.
OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
SHRINK = 0.9


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached memory of the accelerator back, if there is one.

    Args:
        garbage_collection: whether Python's garbage is collected first.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = getattr(torch, kind.type) if kind is not None else None
        if module is not None and hasattr(module, "empty_cache"):
            module.empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Drop references, collect garbage and give cached memory back.

    Args:
        objects: the objects to release.

    Returns:
        As many None, to be assigned to the caller's names: ``a, b = release_memory(a, b)``.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception says that memory ran out.

    Args:
        exception: the exception that was raised.
    """
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception)
    return isinstance(exception, RuntimeError) and any(part in text for part in OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is tried with smaller batches as long as memory runs out.

    Where memory runs out on one of several processes, the others would wait for it in their next
    collective: let the function try a step without collectives, and take the smallest batch size
    over all processes for the training.

    Args:
        function: takes the batch size first; the caller leaves that argument out. None returns the
            decorator.
        starting_batch_size: the first batch size, samples.
        reduce_batch_size_fn: called for the next batch size; None: nine tenths of the last.

    Returns:
        The function without its first parameter.

    Raises:
        TypeError: if a caller passes a batch size, too.
        RuntimeError: if even a batch of one sample does not fit.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, model): ...
        >>> train(model)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def search(*args: object, **kwargs: object) -> Any:
        _check_call(function, args)
        clear_device_cache(garbage_collection=True)
        batch_size = starting_batch_size
        while batch_size > 0:
            fits, result = _attempt(function, batch_size, args, kwargs)
            if fits:
                return result
            # Only here is the traceback gone, which held the tensors of the attempt.
            clear_device_cache(garbage_collection=True)
            batch_size = (
                reduce_batch_size_fn() if reduce_batch_size_fn else int(batch_size * SHRINK)
            )
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


def _attempt(
    function: Callable[..., R],
    batch_size: int,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[bool, R | None]:
    try:
        return True, function(batch_size, *args, **kwargs)
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        return False, None


def _check_call(function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Refuse more positional arguments than there are parameters after the batch size."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    named = [kind for kind in kinds if kind is not inspect.Parameter.KEYWORD_ONLY]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(args) >= len(named):
        name = getattr(function, "__name__", "function")
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called. "
            "Leave it out: the decorator passes it."
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies in this process (of a DTensor; else the tensor)."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
