"""The prepared optimizer: when it steps, and what it hands through (E1, E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from accel import Accelerator
from accel.machine.errors import ConfigError
from accel.optimizer import AcceleratedOptimizer, unwrap_optimizer
from accel.scheduler import AcceleratedScheduler
from accel.state import GradientState


def make(lr: float = 0.5) -> tuple[torch.nn.Linear, AcceleratedOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def test_it_is_an_optimizer_with_the_state_of_the_wrapped_one() -> None:
    _, optimizer = make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["momentum"] == 0.9
    assert unwrap_optimizer(optimizer) is optimizer.optimizer
    assert unwrap_optimizer(optimizer.optimizer) is optimizer.optimizer
    extra = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    assert len(optimizer.optimizer.param_groups) == 2


def test_it_knows_the_state_of_the_process() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    _, optimizer = make()
    assert optimizer.accelerator_state.plan is accelerator.state.plan


def test_step_and_zero_grad_wait_for_the_end_of_a_window() -> None:
    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    GradientState()._set_sync_gradients(False)
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    GradientState()._set_sync_gradients(True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight, before - 0.5)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_closure_is_handed_on() -> None:
    model, optimizer = make()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    with torch.no_grad():
        assert model(torch.ones(1, 2)).sum() < first


def test_a_closure_under_a_gradient_scaler_is_refused() -> None:
    model, _ = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_state_goes_out_and_in() -> None:
    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other_model, other = make()
    other.load_state_dict(optimizer.state_dict())
    expected = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(other.state[other_model.weight]["momentum_buffer"], expected)


def test_schedulers_and_hooks_see_the_wrapped_optimizer() -> None:
    model, optimizer = make()
    calls = []
    optimizer.register_step_post_hook(lambda *args: calls.append("stepped"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert calls == ["stepped"]
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


class ScheduleFree(torch.optim.SGD):
    """SGD that evaluates at the average of its iterates, as schedule-free optimizers do.

    Source: https://arxiv.org/abs/2405.15682
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.iterates: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.iterates.append(self.param_groups[0]["params"][0].detach().clone())

    def _put(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].copy_(value)

    def eval(self) -> None:
        self._put(torch.stack(self.iterates).mean(dim=0))

    def train(self) -> None:
        self._put(self.iterates[-1])


def test_a_schedule_free_optimizer_is_switched_to_evaluation_and_back() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Accelerator(cpu=True).prepare(ScheduleFree([parameter], lr=1.0))
    for _ in range(3):
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    assert parameter.item() == -2.0
    optimizer.train()
    assert parameter.item() == -3.0


@pytest.mark.parametrize(("device_placement", "device"), [(True, "meta"), (False, "cpu")])
def test_state_goes_to_the_device_of_its_parameter(device_placement: bool, device: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    inner.state[parameter] = {"momentum_buffer": torch.ones(2), "step": torch.tensor(3.0)}
    optimizer = AcceleratedOptimizer(inner, device_placement=device_placement)
    state = optimizer.state[parameter]
    assert state["momentum_buffer"].device.type == device
    assert state["step"].item() == 3.0  # a count stays where torch wants it: on the CPU


# -- overflow --------------------------------------------------------------------------------------


def make_scaled(scale: float = 16.0) -> tuple[torch.nn.Parameter, AcceleratedOptimizer]:
    parameter = torch.nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    inner = torch.optim.SGD([parameter], lr=0.125, momentum=0.5)
    return parameter, AcceleratedOptimizer(inner, scaler=scaler)


def test_the_scaler_unscales_gradients_and_skips_what_overflowed() -> None:
    parameter, optimizer = make_scaled()
    scheduler = AcceleratedScheduler(ExponentialLR(optimizer.optimizer, 0.5), optimizer)
    found = []
    for overflows in (False, True, False, True, True, False):
        factor = float("inf") if overflows else 1.0
        optimizer.scaler.scale(parameter.sum() * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rate, scale = scheduler.get_last_lr()[0], optimizer.scaler.get_scale()
        found.append((optimizer.step_was_skipped, parameter.item(), rate, scale))
    assert found == [
        (False, 0.875, 0.0625, 16.0),
        (True, 0.875, 0.0625, 8.0),
        (False, 0.78125, 0.03125, 8.0),
        (True, 0.78125, 0.03125, 4.0),
        (True, 0.78125, 0.03125, 2.0),
        (False, 0.7265625, 0.015625, 2.0),
    ]
