"""In debug mode ranks that do not fit together are named, where they would wait for ever (E5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine import env
from accel.machine.errors import DistributedOperationException
from accel.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from tests.helpers import run_distributed


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(DistributedOperationException) as caught:
        call()
    return str(caught.value)


def in_debug_mode(function: Callable[[int], list[str]]) -> list[str]:
    with env.patched(ACCELERATE_DEBUG_MODE="1"):
        accelerator = Accelerator(cpu=True)
    messages = function(accelerator.process_index)
    # Nobody is left behind: the next exchange works.
    assert gather(torch.tensor([1])).tolist() == [1] * accelerator.num_processes
    accelerator.end_training()
    return messages


def other_shapes(rank: int) -> list[str]:
    """Call everything that exchanges tensors with another shape on the last rank."""
    accelerator = Accelerator()
    data = {"x": torch.zeros((2, 4) if accelerator.is_last_process else (2, 3))}
    calls: list[Callable[[Any], Any]] = [gather, broadcast, reduce]
    calls += [accelerator.gather, accelerator.reduce, accelerator.gather_for_metrics]
    return [refused(lambda call=call: call(data)) for call in calls]  # type: ignore[misc]


@pytest.mark.parametrize("size", [2])
def test_ranks_and_shapes_are_named(size: int) -> None:
    for messages in run_distributed(in_debug_mode, size, other_shapes):
        names = ["gather", "broadcast", "reduce", "gather", "reduce", "gather"]
        assert [message.partition(":")[0] for message in messages] == names
        for message in messages:
            lines = message.splitlines()
            assert lines[0].endswith("ranks disagree on what they exchange. Shapes and types are")
            assert lines[1] == "  rank 0: {'x': '[2, 3] float32'}"
            assert lines[size] == f"  rank {size - 1}: {{'x': '[2, 4] float32'}}"
            assert lines[-1] == "Make them equal, for example with pad_across_processes."


def other_kinds(rank: int) -> list[str]:
    """Disagree in structure, dtype, number of dims and number of objects."""
    ones = torch.ones([1] * (rank + 1))
    return [
        refused(lambda: gather([torch.zeros(1)] * (rank + 1))),
        refused(lambda: gather(torch.zeros(1, dtype=torch.float32 if rank else torch.float64))),
        refused(lambda: pad_across_processes({"x": ones})),
        refused(lambda: broadcast_object_list(["a"] * (rank + 1))),
    ]


def test_structure_type_dims_and_counts_are_compared() -> None:
    counts, types, dims, objects = run_distributed(in_debug_mode, 2, other_kinds)[1]
    assert "rank 1: ['[1] float32', '[1] float32']" in counts
    assert "rank 0: [1] float64" in types
    assert "rank 1: {'x': '2 dims'}" in dims
    assert "rank 1: 2 objects" in objects


def other_calls(rank: int) -> list[str]:
    one = torch.ones(1)
    return [
        refused(lambda: gather(one) if rank else reduce(one)),
        refused(lambda: reduce(one, "sum" if rank else "mean")),
        refused(lambda: broadcast(one, from_process=rank)),
        refused(lambda: gather_object(["a"]) if rank else gather(one)),
    ]


def test_calls_are_compared() -> None:
    calls, settings, sources, objects = run_distributed(in_debug_mode, 2, other_calls)[0]
    assert "rank 0: reduce(reduction='mean', scale=1.0) of [1] float32" in calls
    assert "rank 1: gather() of [1] float32" in calls
    assert calls.endswith("Make the same calls in the same order on every process.")
    assert "rank 1: reduce(reduction='sum', scale=1.0)" in settings
    assert "rank 1: broadcast(from_process=1)" in sources
    assert "rank 1: gather_object() of objects" in objects


def agreement(rank: int) -> list[str]:
    own = torch.full((rank + 1, 2), rank)
    padded = pad_across_processes(own)
    return [
        str(gather(padded).shape[0]),
        str(reduce(torch.tensor([rank]), reduction="sum").item()),
        str(gather_object([{"rank": rank}] * (rank + 1))),
        str(broadcast_object_list([rank, None], from_process=0)),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_agree_are_left_alone(size: int) -> None:
    objects = [{"rank": rank} for rank in range(size) for _ in range(rank + 1)]
    wanted = [str(size * size), str(sum(range(size))), str(objects), "[0, None]"]
    assert run_distributed(in_debug_mode, size, agreement) == [wanted] * size
