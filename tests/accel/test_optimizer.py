"""The prepared optimizer: when it steps, and what it hands through."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accel.errors import ConfigError
from accel.optimizer import AcceleratedOptimizer, unwrap_optimizer
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


def test_any_gradient_scaler_of_torch_will_do() -> None:
    model, _ = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), scaler=scaler)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)
    assert optimizer.step_was_skipped is False
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)
    assert optimizer.step_was_skipped is True
    assert scaler.get_scale() == 4.0


def test_state_goes_out_and_in() -> None:
    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other_model, other = make()
    other.load_state_dict(optimizer.state_dict())
    expected = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(other.state[other_model.weight]["momentum_buffer"], expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_works_on_its_own(duplicate: object) -> None:
    _, optimizer = make()
    twin = duplicate(optimizer)  # type: ignore[operator]
    assert twin.gradient_state.sync_gradients is True
    assert twin.optimizer is not optimizer.optimizer
    assert twin.param_groups[0]["lr"] == 0.5


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


def test_optimizers_that_tell_training_from_evaluation_are_told() -> None:
    _, optimizer = make()
    modes = []
    optimizer.optimizer.train = lambda: modes.append("train")
    optimizer.optimizer.eval = lambda: modes.append("eval")
    optimizer.train()
    optimizer.eval()
    assert modes == ["train", "eval"]
    make()[1].train()  # others do nothing
