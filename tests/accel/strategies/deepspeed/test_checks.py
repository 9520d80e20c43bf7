"""Runs, models and optimizers that an engine of DeepSpeed cannot take (E5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.handlers import GradScalerKwargs
from accel.machine.errors import ConfigError, StateError
from accel.strategies.deepspeed.settings import plan_problems
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    adamw,
    build,
    data,
    error_of,
    largest,
    own,
    plan_of,
)
from tests.helpers import run_distributed


def test_options_of_a_scaler_that_an_engine_ignores_are_named() -> None:
    plan = plan_of(DeepSpeedPlugin(), kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    (found,) = plan_problems(replace(plan, mixed_precision="fp16"))
    assert str(found).startswith("GradScalerKwargs(init_scale=2.0) with deepspeed:")
    assert plan_problems(replace(plan, mixed_precision="bf16")) == []
    plan = plan_of(DeepSpeedPlugin(), kwargs_handlers=[GradScalerKwargs()])
    assert plan_problems(replace(plan, mixed_precision="fp16")) == []


def refuses() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    first, second = build(), build()
    with pytest.raises(ConfigError, match="2 models in one call under DeepSpeed"):
        accelerator.prepare(first, second, adamw(first))
    with pytest.raises(ConfigError, match="an optimizer without its model"):
        accelerator.prepare(adamw(first))
    with pytest.raises(ConfigError, match="parameters of the optimizer are in no prepared model"):
        accelerator.prepare(first, adamw(second))
    with pytest.raises(StateError, match="trains no model yet"):
        accelerator.backward(torch.zeros(1, requires_grad=True).sum())
    model, optimizer = accelerator.prepare(first, adamw(first))
    with pytest.raises(ConfigError, match="a second model with one plugin"):
        accelerator.prepare(second, adamw(second))
    with pytest.raises(ConfigError, match="supports norm clipping only"):
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    with pytest.raises(ConfigError) as error:
        accelerator.clip_grad_norm_(list(model.parameters())[:1], 0.5, norm_type=1)
    text = str(error.value)
    assert "DeepSpeedPlugin(gradient_clipping=1.0)" in text
    assert "norm of order 2" in text
    assert "5 of them are missing" in text
    with pytest.raises(ConfigError, match=r"step\(closure\) under DeepSpeed"):
        optimizer.step(lambda: None)
    with pytest.raises(ConfigError, match=r"backward\(create_graph=…\)"):
        accelerator.backward(torch.zeros(1, requires_grad=True).sum(), create_graph=True)
    with pytest.warns(UserWarning, match="same number of batches"):
        with accelerator.strategy.sync.join([model]):
            pass
    accelerator.end_training()


def refuses_devices() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build()
    with pytest.raises(ConfigError, match="only stage 3 shards a model that is not trained"):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    accelerator.end_training()
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Expert")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    with pytest.raises(ConfigError, match="transformer_moe_cls_names='Expert'"):
        accelerator.prepare(second := build(), adamw(second))
    accelerator.end_training()


def refusals() -> None:
    refuses()
    refuses_devices()
    refuses_a_frozen_group()


@pytest.mark.parametrize("world_size", [1, 2])
def test_objects_and_devices_that_an_engine_cannot_take(world_size: int) -> None:
    run_distributed(refusals, world_size)


def refuses_a_frozen_group() -> None:
    for stage, refused, empty in ((1, True, False), (2, True, True), (3, False, False)):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model = build()
        model[0].requires_grad_(False)
        first = [] if empty else model[0].parameters()
        groups = [{"params": first}, {"params": model[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if refused:
            with pytest.raises(
                ConfigError, match=r"group 0 of the optimizer.*are all frozen or none.*Give"
            ):
                accelerator.prepare(model, optimizer)
        else:
            accelerator.prepare(model, optimizer)
        accelerator.end_training()


# -- experts, and models after one another ---------------------------------------------------


class Experts(torch.nn.Module):
    """Two experts, of which a process sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(5, 3) for _ in range(2)])
        self.chosen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](inputs)


class Nested(torch.nn.Module):
    """Experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = torch.nn.Linear(5, 5), Experts()
        self.last = torch.nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(torch.tanh(self.first(inputs))))


def trains_other_experts_on_each_rank() -> None:
    """Without the leaf, ranks would wait for parameters that the others do not fetch."""
    plugin = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        transformer_moe_cls_names="Experts",
    )
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model, reference = Nested(), Nested()
    model.moe.chosen = accelerator.process_index
    inner = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.module.moe._z3_leaf
    for inputs, targets in data(GLOBAL_BATCH, steps=3):
        for rank in range(2):
            reference.moe.chosen = rank
            (error_of(reference(inputs[rank::2]), targets[rank::2]) / 2).backward()
        inner.step()
        inner.zero_grad()
        accelerator.backward(error_of(model(own(accelerator, inputs)), own(accelerator, targets)))
        optimizer.step()
        optimizer.zero_grad()
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-6
    accelerator.end_training()


def test_experts_are_leaves_that_ranks_choose_differently() -> None:
    run_distributed(trains_other_experts_on_each_rank, 2)
