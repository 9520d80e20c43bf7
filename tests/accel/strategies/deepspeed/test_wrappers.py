"""Optimizers and schedulers under DeepSpeed: placeholders, and wrappers that the engine steps.

Holds E1, E3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError, StateError
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
)
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    build,
    data,
    error_of,
    largest,
    own,
    train,
)
from tests.helpers import run_distributed


def test_stand_ins_cannot_step_alone() -> None:
    dummy = DummyOptim([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(StateError, match="DummyOptim is a placeholder"):
        dummy.step()
    scheduler = DummyScheduler(dummy)
    assert scheduler.optimizer is dummy
    assert scheduler.state_dict() == {}
    for call in (scheduler.step, lambda: scheduler.load_state_dict({})):
        with pytest.raises(StateError, match="DummyScheduler is a placeholder"):
            call()


# -- schedules of an optimizer that the engine replaces --------------------------------------


def adagrad(model: torch.nn.Module, num_groups: int) -> torch.optim.Adagrad:
    parameters = list(model.parameters())
    groups = [parameters] if num_groups == 1 else [parameters[:2], parameters[2:]]
    return torch.optim.Adagrad([{"params": group, "lr": 0.1} for group in groups], lr=0.5)


def schedule(kind: str, optimizer: torch.optim.Optimizer, each: int) -> Any:
    """A warm-up, or a quarter of the rate after each step; a step counts `each` times."""
    schedules = torch.optim.lr_scheduler
    if kind == "warm":
        return schedules.LambdaLR(optimizer, lambda step: 0.1 * (1 + step // each))
    parts = [schedules.StepLR(optimizer, each, 0.25) for _ in range(2)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3 * each])


def steers_adagrad(stage: int, kind: str) -> None:
    """DeepSpeed builds another Adagrad: group and schedule are those of the given one."""
    reference = build()
    inner = adagrad(reference, 1)
    inner_schedule = schedule(kind, inner, 1)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = build()
    optimizer = adagrad(model, 1)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, schedule(kind, optimizer, accelerator.num_processes)
    )
    for inputs, targets in data(GLOBAL_BATCH, steps=4):
        error_of(reference(inputs), targets).backward()
        inner.step()
        inner_schedule.step()
        inner.zero_grad()
        accelerator.backward(error_of(model(own(accelerator, inputs)), own(accelerator, targets)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found = [group["lr"] for group in optimizer.param_groups]
    assert found == pytest.approx([group["lr"] for group in inner.param_groups]), (stage, kind)
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-5, stage
    accelerator.end_training()


def refuses_a_schedule_from_another_rate() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=1))
    model = build()
    stand_in = DummyOptim(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(stand_in, lambda step: 0.5**step)
    accelerator.prepare(model, stand_in)
    with pytest.raises(ConfigError, match=r"LambdaLR on DummyOptim\(lr=0.001\).*engine's is 0.2"):
        accelerator.prepare_scheduler(scheduler)
    accelerator.end_training()


def refuses_adagrad_in_groups() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    model = build()
    with pytest.raises(ConfigError, match=r"Adagrad with 2 groups under ZeRO 1.*one group"):
        accelerator.prepare(model, adagrad(model, 2))
    accelerator.end_training()


def schedules() -> None:
    steers_adagrad(2, "sequential")
    steers_adagrad(3, "warm")
    refuses_adagrad_in_groups()
    refuses_a_schedule_from_another_rate()


def test_schedules_steer_the_optimizer_that_steps() -> None:
    run_distributed(schedules, 2)


# -- optimizers and schedulers of the configuration ------------------------------------------


def takes_both_from_the_configuration() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.0,
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": "auto",
    }
    plugin = DeepSpeedPlugin(config, zero_stage=1)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.0)
    size = accelerator.num_processes
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, data(GLOBAL_BATCH // size)
    )
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    rates = []
    for inputs, targets in loader:
        train(accelerator, model, optimizer, scheduler, [(inputs, targets)])
        rates.append(scheduler.get_last_lr()[0])
    assert rates[:5] == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02], abs=1e-9)
    assert model.gradient_clipping() == 1.0  # of "auto"
    accelerator.end_training()


def takes_the_optimizer_from_the_configuration_and_a_schedule_of_torch() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=2))
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batch = next(iter(data(4)))
    train(accelerator, model, optimizer, scheduler, [batch, batch])
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * accelerator.num_processes)
    accelerator.end_training()


def configurations() -> None:
    takes_both_from_the_configuration()
    takes_the_optimizer_from_the_configuration_and_a_schedule_of_torch()


def test_optimizer_and_schedule_come_from_either_side() -> None:
    run_distributed(configurations, 2)


# -- what `prepare` returns ------------------------------------------------------------------


def steps_and_drops_gradients() -> None:
    plugin = DeepSpeedPlugin(zero_stage=1, gradient_clipping=100.0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    reference, model = build(), build()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    stand_in = DummyScheduler(
        given,
        lr_scheduler_callable=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5),
    )
    model, optimizer, scheduler = accelerator.prepare(model, given, stand_in)
    assert isinstance(optimizer, DeepSpeedOptimizerWrapper)
    assert isinstance(scheduler, DeepSpeedSchedulerWrapper)
    assert scheduler.optimizers == [optimizer]
    assert optimizer.engine is model
    assert [len(group) for group in optimizer.groups] == [len(list(reference.parameters()))]
    assert optimizer.clipping == 100.0
    assert not optimizer.trainable.changed()
    dropped, kept = list(data(4))[:2]
    accelerator.backward(error_of(model(dropped[0]), dropped[1]))
    assert optimizer.window_ended is True
    optimizer.zero_grad()
    assert optimizer.window_ended is False
    accelerator.backward(error_of(model(kept[0]), kept[1]))
    with pytest.raises(ConfigError, match="calls no closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    assert optimizer.step_was_skipped is False
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05]
    with pytest.raises(ConfigError, match="add_param_group under DeepSpeed"):
        optimizer.add_param_group({"params": []})
    error_of(reference(kept[0]), kept[1]).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-6
    accelerator.end_training()


def test_what_prepare_returns_steps_and_drops_gradients() -> None:
    run_distributed(steps_and_drops_gradients, 1)


class _Engine:
    """What a wrapper asks of an engine."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(is_boundary)

    def backward(self, loss: object, **kwargs: object) -> None:
        self.calls.append((loss, kwargs))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> object:
        return self.calls[-1] if self.calls else None


def test_a_wrapped_engine_steps_where_a_window_ends() -> None:
    engine: Any = _Engine()
    wrapped, loss = DeepSpeedEngineWrapper(engine), torch.ones(1)
    assert wrapped.engine is engine
    assert wrapped.get_global_grad_norm() is None
    wrapped.backward(loss, sync_gradients=False, retain_graph=True)
    assert engine.calls == [False, (loss, {"retain_graph": True})]
    wrapped.backward(loss)
    assert engine.calls[2:] == [True, (loss, {}), "step"]
    engine.calls = [torch.tensor(2.0)]
    assert wrapped.get_global_grad_norm() == 2.0
