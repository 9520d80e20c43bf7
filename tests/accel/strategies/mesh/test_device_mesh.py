"""The mesh of a run is destroyed at its end with its process groups, and the model says so (E3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel.machine.errors import StateError
from tests.accel.strategies.training import (
    BATCH,
    Model,
    adamw,
    build,
    data,
    local_sizes,
    steps_of,
)
from tests.helpers import gloo_threads, gloo_threads_left, run_distributed

Engines = dict[str, Any]
ENGINES: list[Engines] = [
    {"fsdp": {"reshard_after_forward": 2}},  # smaller groups of FSDP2's own
    {"fsdp": {}, "tp": {"tp_size": 2}},
]
ROUNDS = 3


def trained(engines: Engines) -> tuple[Any, Any]:
    accelerator = build(**engines)
    model = Model()
    prepared = accelerator.prepare(model, adamw(model), DataLoader(data(1), BATCH))
    steps_of(accelerator, *prepared)
    return accelerator, prepared


def counted_rounds() -> dict[str, list[int]]:
    """Return the threads while and after each training, of which everything is kept."""
    found, kept = {}, []
    for engines in ENGINES:
        counts = [gloo_threads()]
        for _ in range(ROUNDS):
            accelerator, prepared = trained(engines)
            assert gloo_threads() > counts[0]
            accelerator.end_training()
            accelerator.end_training()
            counts.append(gloo_threads_left(counts[0]))
            kept.append((accelerator, prepared))
        found[str(engines)] = counts
    return found


@pytest.mark.slow  # many meshes; those below are of one
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_no_thread_of_a_mesh_outlives_the_training() -> None:
    for found in run_distributed(counted_rounds, 4):
        for engines, counts in found.items():
            assert max(counts[1:]) <= counts[0], engines


def borrowed() -> int:
    """A group that the script built stays, and the groups of the mesh go."""
    dist.init_process_group("gloo")
    own = dist.new_group([0, 1])
    counts = []
    for _ in range(2):
        accelerator, _ = trained({"tp": {"tp_size": 2}})
        accelerator.end_training()
        counts.append(gloo_threads_left(min(counts, default=gloo_threads())))
    assert dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total, group=own)
    assert total.item() == 2.0
    return counts[1] - counts[0]


def test_groups_of_the_script_stay() -> None:
    assert max(run_distributed(borrowed, 2)) <= 0


def refused() -> tuple[str, dict[str, tuple[int, ...]]]:
    accelerator, (model, *_) = trained({"fsdp": {}})
    accelerator.end_training()
    with pytest.raises(StateError) as caught:
        model(torch.zeros(1, 4, dtype=torch.long))
    return str(caught.value), local_sizes(model)


def test_a_sharded_model_refuses_to_compute_after_the_end() -> None:
    for words, sizes in run_distributed(refused, 2):
        assert "destroyed by end_training()" in words
        assert sizes["embed.weight"] == (6, 8)  # what this process holds can still be read
