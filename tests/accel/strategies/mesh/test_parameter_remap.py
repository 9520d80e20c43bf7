"""Optimizers are remapped to shards, whatever is prepared first (E3)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.accel.strategies.training import (
    BATCH,
    Model,
    adamw,
    build,
    data,
    difference,
    loss_of,
    plain,
    steps_of,
)
from tests.helpers import run_distributed

CLOSE = 1e-5


def check_orders() -> None:
    expected = plain(Model())[2]

    def with_state() -> tuple[Any, Any]:
        model = Model()
        optimizer = adamw(model)
        tokens, targets = data().tensors
        loss_of(model, tokens[:8], targets[:8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def started() -> dict[str, torch.Tensor]:
        model, optimizer = with_state()
        for tokens, targets in DataLoader(data(), BATCH):
            loss_of(model, tokens, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    for order in ("together", "optimizer first", "model first", "after", "with state"):
        accelerator = build(fsdp={})
        model, optimizer = with_state() if order == "with state" else (Model(), None)
        optimizer = optimizer or adamw(model)
        if order in ("together", "with state"):
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(adamw(model) if order == "after" else optimizer)
        loader = accelerator.prepare(DataLoader(data(), BATCH))
        steps_of(accelerator, model, optimizer, loader)
        target = started() if order == "with state" else expected
        assert difference(accelerator.get_state_dict(model), target) < CLOSE, order
        accelerator.end_training()


def test_the_order_of_preparing_does_not_matter() -> None:
    run_distributed(check_orders, 2)
