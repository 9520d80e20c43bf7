"""Weights in bf16: what a recipe casts, and which optimizers and strategies it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError
from runner.recipe import parts, weights_format
from runner.recipe.schema import Precision
from tests.accel.precision.float8 import needs_torchao
from tests.runner.recipe.test_parts import recipe

BF16 = Precision(mode="bf16", weights="bf16")
ROUNDING = {"name": "adamw", "stochastic_rounding": True}


@needs_torchao
def test_weights_are_cast_before_the_optimizer_is_made() -> None:
    built = parts.build_parts(recipe(precision=BF16, optimizer=ROUNDING))
    model, optimizer = built.step.models["model"], built.step.optimizers["optimizer"]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert optimizer.bf16_stochastic_round is True


def test_buffers_and_tied_weights_stay_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.append(torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    weights_format.cast(model, recipe(precision=BF16))
    assert model[2].weight is model[0].weight
    assert model[0].weight.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32
    other = torch.nn.Linear(2, 2)
    weights_format.cast(other, recipe())
    assert other.weight.dtype == torch.float32


def test_updates_that_would_be_lost_are_refused() -> None:
    for optimizer in ({"name": "adamw"}, {"_target_": "torch.optim.SGD", "lr": 0.1}):
        with pytest.raises(ConfigError, match=r"updates of less than 2\*\*-9 of a weight are lost"):
            parts.build_parts(recipe(precision=BF16, optimizer=optimizer))


@needs_torchao
def test_rounding_without_weights_in_bf16_is_refused() -> None:
    with pytest.raises(ConfigError, match="it concerns weights in bf16, and there are none"):
        parts.build_parts(recipe(optimizer=ROUNDING))


def test_a_step_that_builds_its_own_models_decides_their_format() -> None:
    nodes = dict.fromkeys(("model", "objective", "optimizer", "scheduler"))
    with pytest.raises(ConfigError, match=r"parameters of '\w+' are in fp32"):
        parts.build_step(recipe(precision=BF16, step={"name": "gan"}, **nodes))


def test_an_engine_with_master_weights_refuses_them() -> None:
    (problem,) = weights_format.strategy_problems(
        recipe(precision=BF16, deepspeed=DeepSpeedPlugin(zero_stage=2))
    )
    assert "precision.weights=bf16 with deepspeed=" in str(problem)
    assert not weights_format.strategy_problems(recipe(precision=BF16))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"weights": "bf16"}, "precision.weights=bf16 with precision.mode=no"),
        ({"mode": "fp16", "weights": "bf16"}, "with precision.mode=fp16"),
        ({"mode": "bf16", "weights": "fp16"}, "Precision.weights='fp16': it is one of bf16"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Precision(**values)
    assert problem in str(refused.value)
