"""Whole parameters among split activations: their gradients are summed, or they are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.config.tensor_parallel import SUMMED
from accel.errors import ConfigError
from tests.accel.strategies.training import (
    PLAN,
    WIDTH,
    Model,
    adamw,
    build,
    data,
    difference,
    largest,
    loss_of,
    plain,
    train,
)
from tests.helpers import run_distributed

CLOSE = 1e-5
HEADS, HEAD_WIDTH = 4, 5


class HeadBlock(torch.nn.Module):
    """A gain and a norm of each head, between split matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.gain = torch.nn.Parameter(torch.ones(HEAD_WIDTH))
        self.norm = torch.nn.LayerNorm(HEAD_WIDTH)
        self.down = torch.nn.Linear(HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.up(hidden).unflatten(-1, (-1, HEAD_WIDTH))
        return hidden + self.down(self.norm(heads * self.gain).flatten(-2))


class HeadModel(Model):
    _no_split_modules = ("HeadBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([HeadBlock(), HeadBlock()])


def check_summed(engines: dict[str, Any]) -> None:
    plan = {**PLAN, "blocks.*.gain": SUMMED, "blocks.*.norm": SUMMED}
    engines = {**engines, "tp": {"tp_size": 2, "tp_plan": plan}}
    accelerator = build(**engines, gradient_accumulation_steps=2)
    losses, norms, weights = train(accelerator, HeadModel())
    expected = plain(HeadModel(), accumulation=2)
    assert largest(losses, expected[0]) < CLOSE
    assert largest(norms, expected[1]) < CLOSE
    assert difference(weights, expected[2]) < CLOSE


@pytest.mark.parametrize(
    ("world_size", "engines"),
    [(2, {}), (2, {"fsdp": {}}), pytest.param(4, {}, marks=pytest.mark.slow)],
)
def test_gradients_of_whole_parameters_are_summed(world_size: int, engines: dict[str, Any]) -> None:
    run_distributed(check_summed, world_size, engines)


def check_unequal(engines: dict[str, Any]) -> None:
    plan = {**PLAN, "blocks.*.norm": SUMMED}
    accelerator = build(**engines, tp={"tp_size": 2, "tp_plan": plan})
    model = HeadModel()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, *data(1).tensors))
    named = r"gradients of blocks.0.gain, blocks.1.gain that differ.*tp_plan"
    with pytest.raises(ConfigError, match=named):
        optimizer.step()
    optimizer.step()  # once is enough


@pytest.mark.parametrize("engines", [{}, {"fsdp": {}}])
def test_whole_parameters_with_unequal_gradients_are_named(engines: dict[str, Any]) -> None:
    run_distributed(check_unequal, 2, engines)


def check_split_and_summed() -> None:
    accelerator = build(tp={"tp_size": 2, "tp_plan": {**PLAN, "blocks.*": SUMMED}})
    with pytest.raises(ConfigError, match=r"blocks.0.up.weight is split, and replicated_with"):
        accelerator.prepare(HeadModel())


def test_a_parameter_is_split_or_whole() -> None:
    run_distributed(check_split_and_summed, 2)
