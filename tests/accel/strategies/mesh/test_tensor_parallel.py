"""Tensor-parallel plans, and gradients of replicated parameters among sharded activations (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from accel.config.tensor_parallel import SUMMED
from accel.machine.errors import ConfigError
from accel.strategies.mesh.tensor_parallel import resolve_plan
from tests.accel.strategies.training import (
    PLAN,
    WIDTH,
    Model,
    adamw,
    assert_as_plain,
    build,
    data,
    loss_of,
)
from tests.helpers import run_distributed


def test_patterns_name_modules_and_replicated_parameters() -> None:
    styles, summed = resolve_plan(
        Model(), {"blocks.*.up": "colwise", "blocks.1": SUMMED, "shift": SUMMED}
    )
    assert list(styles) == ["blocks.0.up", "blocks.1.up"]
    assert all(isinstance(style, ColwiseParallel) for style in styles.values())
    own = {name for name, _ in Model().blocks[1].named_parameters(prefix="blocks.1")}
    assert set(summed) == {*own, "shift"}
    with pytest.raises(ConfigError, match=r"'shift'\]: no module of the model"):
        resolve_plan(Model(), {"shift": "colwise"})


# -- gradients of replicated parameters ----------------------------------------------------


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
    assert_as_plain(accelerator, HeadModel(), HeadModel(), accumulation=2)


@pytest.mark.parametrize(
    ("world_size", "engines"),
    [(2, {}), (2, {"fsdp": {}}), pytest.param(4, {}, marks=pytest.mark.slow)],
)
def test_replicated_parameters_have_summed_gradients(
    world_size: int, engines: dict[str, Any]
) -> None:
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
def test_replicated_parameters_with_unequal_gradients_are_named(engines: dict[str, Any]) -> None:
    run_distributed(check_unequal, 2, engines)
