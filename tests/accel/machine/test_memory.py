"""Memory is given back, and a batch size that fits is found (E1)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accel.machine.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


def test_release_memory() -> None:
    first, second, cycle = (torch.nn.Linear(1, 1) for _ in range(3))
    cycle.extra = [cycle]  # only the garbage collector finds it
    gone, collected = weakref.ref(first), weakref.ref(cycle)
    del cycle
    first, second = release_memory(first, second)
    assert first is None
    assert second is None
    assert gone() is None
    assert collected() is None


def test_clear_device_cache_collects_garbage_where_asked() -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()  # nothing but the call under test may collect
    try:
        reference = weakref.ref(Knot())
        clear_device_cache()
        assert reference() is not None
        clear_device_cache(garbage_collection=True)
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("any text"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_speak_of_memory(error: Exception, expected: bool) -> None:
    assert should_reduce_batch_size(error) is expected


def test_batches_shrink_until_they_fit() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, name: str, *, scale: int = 1) -> tuple[str, int]:
        tried.append(batch_size)
        if batch_size > 75:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return name, scale * batch_size

    assert train("a", scale=2) == ("a", 144)
    assert tried == [100, 90, 81, 72]
    assert train.__name__ == "train"


def test_a_rule_of_ones_own() -> None:
    sizes = iter([8, 4])
    tried = []

    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("out of memory")

    find_executable_batch_size(train, 16, reduce_batch_size_fn=lambda: next(sizes))()
    assert tried == [16, 8, 4]


def test_nothing_fits() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train()


def test_other_errors_pass() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train()


def test_the_batch_size_is_not_the_callers() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, name: str) -> None: ...

    with pytest.raises(TypeError, match="Batch size was passed into `train`"):
        train(128, "a")


def test_an_attempts_tensors_are_gone_before_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        if held:
            return held[0]() is None
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    assert train()
