"""Gathered parameters hide no change of the shards; submodules may be called by themselves (R5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.accel.strategies.training import BATCH, Model, adamw, build, data, largest, loss_of
from tests.helpers import run_distributed

CLOSE = 1e-5
MAX_NORM = 0.5
ENGINES: list[dict[str, Any]] = [
    {"fsdp": {}},
    {"fsdp": {"reshard_after_forward": False}},
    {"tp": {"tp_size": 1}},  # replicas, whose gradients FSDP2 averages
]


@dataclass
class Run:
    """A model that is trained by a plain loop or by an accelerator."""

    model: torch.nn.Module
    prepare: Callable[[Any], Any]
    backward: Callable[[torch.Tensor], None]
    clip: Callable[..., torch.Tensor]
    optimizer: Any = None

    def loss(self, step: int) -> torch.Tensor:
        part = slice(step * BATCH, (step + 1) * BATCH)
        return loss_of(self.model, *(tensor[part] for tensor in data().tensors))

    def evaluate(self, step: int) -> float:
        with torch.no_grad():
            return self.loss(step).item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def between(run: Run, step: int) -> list[float]:
    """Evaluate between backward and step."""
    loss = run.loss(step)
    run.backward(loss)
    seen = run.evaluate(step)
    run.update()
    return [loss.item(), seen]


def during(run: Run, step: int) -> list[float]:
    """Evaluate between forward and backward."""
    loss = run.loss(step)
    seen = run.evaluate(step + 1)
    run.backward(loss)
    run.update()
    return [loss.item(), seen]


def without_backward(run: Run, step: int) -> list[float]:
    """Run a forward pass with gradients, and no backward, before clipping and before the step."""
    loss = run.loss(step)
    run.backward(loss)
    unused = run.loss(step).item()
    norm = run.clip(list(run.model.parameters()), MAX_NORM)
    run.loss(step)
    run.update()
    return [loss.item(), unused, norm.item()]


def swapped(run: Run, step: int) -> list[float]:
    """Evaluate other weights, written over the parameters taken at the start, and back."""
    held = run.optimizer.param_groups[0]["params"]
    loss = run.loss(step)
    run.backward(loss)
    run.update()
    saved = [parameter.detach().clone() for parameter in held]
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(0.5)
        seen = run.evaluate(step)
        for parameter, value in zip(held, saved, strict=True):
            parameter.copy_(value)
    return [loss.item(), seen]


def first_evaluated(run: Run, step: int) -> list[float]:
    """Build the optimizer after an evaluation."""
    if step == 0:
        seen = run.evaluate(0)
        run.optimizer = run.prepare(adamw(run.model))
        return [seen, *between(run, step)]
    return between(run, step)


def over_copies(run: Run, step: int) -> list[float]:
    """Build the optimizer over copies, which a pass with gradients leaves until its backward."""
    if step == 0:
        loss = run.loss(0)
        optimizer = adamw(run.model)
        run.backward(loss)
        run.optimizer = run.prepare(optimizer)
        run.update()
        return [loss.item()]
    return between(run, step)


FLOWS = (between, during, without_backward, swapped, first_evaluated, over_copies)


def check_flows(engines: dict[str, Any]) -> None:
    accelerator = build(**engines)
    for flow in FLOWS:
        model, other = Model(), Model()
        optimizer, plain = accelerator.prepare(adamw(model)), adamw(other)
        accelerator.prepare(model)
        clip = accelerator.clip_grad_norm_
        sharded = Run(model, accelerator.prepare, accelerator.backward, clip, optimizer)
        expected = Run(other, lambda given: given, torch.Tensor.backward, clip_grad_norm_, plain)
        for step in range(2):
            assert largest(flow(sharded, step), flow(expected, step)) < CLOSE, flow.__name__


@pytest.mark.parametrize("engines", ENGINES, ids=str)
def test_training_goes_on_from_the_shards(engines: dict[str, Any]) -> None:
    run_distributed(check_flows, 2, engines)
