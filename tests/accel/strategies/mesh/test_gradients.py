"""Norms of sharded gradients, of any order and dtype (E3)."""

from __future__ import annotations

import pytest
import torch

from tests.accel.strategies.training import Model, build, data, loss_of
from tests.helpers import run_distributed

CLOSE = 1e-5
BF16 = 2e-2


def check_norms() -> None:
    accelerator, expected = build(fsdp={}), Model()
    model = accelerator.prepare(Model())
    tokens, targets = data().tensors
    accelerator.backward(loss_of(model, tokens, targets))
    loss_of(expected, tokens, targets).backward()
    for order in (1.0, 2.0, 3.0, float("inf")):
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9, order)
        target = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9, order)
        assert abs(norm.item() - target.item()) < CLOSE
    assert accelerator.clip_grad_norm_([], 1.0).item() == 0.0
    if accelerator.num_processes > 1:  # one that holds no gradient is not waited for
        parameters = list(model.parameters())
        gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
        if not accelerator.is_main_process:
            model.zero_grad()
            gradients = []
        local = sum((g.square().sum() for g in gradients), torch.zeros(()))
        target = accelerator.reduce(local, "sum").sqrt()
        assert abs((accelerator.clip_grad_norm_(parameters, 1e9) - target).item()) < CLOSE


@pytest.mark.parametrize("world_size", [1, 4])
def test_norms_of_every_order(world_size: int) -> None:
    run_distributed(check_norms, world_size)


def check_norms_of_little() -> None:
    accelerator = build(fsdp={})
    tokens = torch.zeros(2, 4, dtype=torch.long)
    for dtype in (torch.float64, torch.bfloat16):
        model, expected = Model(frozen=False).to(dtype), Model(frozen=False).to(dtype)
        accelerator.prepare(model)
        accelerator.backward(model(tokens).square().mean())
        expected(tokens).square().mean().backward()
        # Five elements on four ranks: the last one holds none.
        norm = accelerator.clip_grad_norm_([model.shift], 1e9)
        target = expected.shift.grad.norm()
        assert abs(norm.item() / target.item() - 1.0) < BF16
    accelerator.end_training()


def test_norms_of_what_some_ranks_hold_nothing_of() -> None:
    run_distributed(check_norms_of_little, 4)
