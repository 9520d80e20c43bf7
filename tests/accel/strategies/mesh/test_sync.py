"""Gradients accumulated without synchronization are reduced when it is triggered (E3)."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.accel.strategies.training import Model, build, data, difference, loss_of
from tests.helpers import run_distributed

CLOSE = 1e-5


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def check_trigger() -> None:
    tokens, targets = data().tensors
    accelerator = build(fsdp={})
    model = accelerator.prepare(Model())
    shards = list(model.parameters())
    rank, size = accelerator.process_index, accelerator.num_processes
    losses = []
    for index in range(2):
        mine = slice((index * size + rank) * 4, (index * size + rank + 1) * 4)
        with accelerator.no_sync(model):
            losses.append(loss_of(model, tokens[mine], targets[mine]))
            if index == 0:
                accelerator.backward(losses[0])
                assert all(shard.grad is None for shard in shards)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    expected = Model()
    for index in range(2):
        both = slice(index * size * 4, (index + 1) * size * 4)
        loss_of(expected, tokens[both], targets[both]).backward()
    assert difference(gradients_of(model), gradients_of(expected)) < CLOSE


@pytest.mark.parametrize("world_size", [1, 2])
def test_trigger_sync_reduces_accumulated_gradients(world_size: int) -> None:
    run_distributed(check_trigger, world_size)
