"""fp16: no gradient is held across a change of the loss scale without following it (E3).

Each weight starts at zero, each gradient is 1 and each learning rate 1, so that weights count what
was stepped, exactly: scales are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from accel import Accelerator
from accel.config.handlers import GradScalerKwargs
from accel.machine.errors import StateError
from tests.accel.strategies.training import build
from tests.helpers import run_distributed

SCALE = 1024.0
ONES = torch.ones(1, 2)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": {}},
    "fsdp_gathered": {"fsdp": {"reshard_after_forward": False}},
    "tp": {"tp": {"tp_size": 2}},
}


class Net(torch.nn.Module):
    """Four weights, whose gradients of the sum of all outputs are the inputs."""

    _tp_plan: ClassVar = {"layer": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def started(engines: dict[str, Any], grows: bool = False, accumulation: int = 1) -> Accelerator:
    handler = GradScalerKwargs(init_scale=SCALE, growth_interval=1 if grows else 1000)
    return build(
        **engines,
        mixed_precision="fp16",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[handler],
    )


def sgd(*models: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=1.0)


def weight(accelerator: Accelerator, model: torch.nn.Module) -> float:
    """Return the one value of all weights of a `Net`."""
    (values,) = accelerator.get_state_dict(model).values()
    assert values.unique().numel() == 1, values
    return float(values[0, 0])


def loss_of(accelerator: Accelerator, model: torch.nn.Module, overflows: bool) -> torch.Tensor:
    """Return the sum of outputs, on one process alone times infinity if it `overflows`."""
    loss = model(ONES).sum()
    return loss * math.inf if overflows and accelerator.is_last_process else loss


def two_windows(engines: dict[str, Any], grows: bool) -> list[float]:
    """A GAN: one optimizer's step changes the scale while the other's window is open."""
    accelerator = started(engines, grows, accumulation=4)
    first, second = Net(), Net()
    first, second, *optimizers = accelerator.prepare(first, second, sgd(first), sgd(second))
    for index in range(8):
        with accelerator.accumulate(first, second):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                overflows = model is first and index == 3 and not grows
                accelerator.backward(loss_of(accelerator, model, overflows))
                optimizer.step()
                optimizer.zero_grad()
        if index == 3:
            assert accelerator.optimizer_step_was_skipped is not grows
    found = [weight(accelerator, model) for model in (first, second)]
    accelerator.end_training()
    return found


def shared_encoder(engines: dict[str, Any], grows: bool) -> list[float]:
    """Two losses reach an encoder, and a head steps between them."""
    accelerator = started(engines, grows)
    encoder, head = Net(), Net()
    encoder, head, *optimizers = accelerator.prepare(encoder, head, sgd(encoder), sgd(head))
    accelerator.backward(encoder(ONES).sum() + loss_of(accelerator, head, not grows))
    optimizers[1].step()
    assert optimizers[1].step_was_skipped is not grows
    accelerator.backward(encoder(ONES).sum())
    optimizers[0].step()
    assert not optimizers[0].step_was_skipped
    found = [weight(accelerator, model) for model in (encoder, head)]
    accelerator.end_training()
    return found


def common_parameters(engines: dict[str, Any], grows: bool) -> list[float]:
    """Two optimizers step one encoder by the same gradients: those are unscaled once."""
    accelerator = started(engines, grows)
    encoder, head = Net(), Net()
    encoder, head, first, second = accelerator.prepare(
        encoder, head, sgd(encoder, head), sgd(encoder)
    )
    for overflows in (not grows, False):
        loss = encoder(ONES).sum() + loss_of(accelerator, head, overflows)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(head.parameters(), 100.0)
        first.step()
        second.step()
        first.zero_grad()
    found = [weight(accelerator, model) for model in (encoder, head)]
    accelerator.end_training()
    return found


def kept_gradients(engines: dict[str, Any], grows: bool) -> list[float]:
    """As in fp32, gradients add up that were unscaled early, or kept after a step."""
    accelerator = started(engines, grows)
    model, optimizer = (net := Net()), sgd(net)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(ONES).sum())
    accelerator.unscale_gradients()
    accelerator.backward(model(ONES).sum())
    accelerator.scaler.update(SCALE / 4)  # set by hand: the gradients follow
    optimizer.step()  # by 2
    accelerator.backward(model(ONES).sum())
    optimizer.step()  # by 3
    found = [weight(accelerator, model)]
    accelerator.end_training()
    return found


def loose_parameters(engines: dict[str, Any], grows: bool) -> list[float]:
    """Parameters that no optimizer holds are clipped with the rest, and unscaled for that."""
    accelerator = started(engines, grows)
    first, second = Net(), Net()
    first, second, optimizer = accelerator.prepare(first, second, sgd(first))
    norms = []
    for _ in range(2):
        accelerator.backward(first(ONES).sum() + second(ONES).sum())
        first(ONES)  # FSDP leaves gathered parameters behind
        parameters = [*first.parameters(), *second.parameters()]
        norms.append(float(accelerator.clip_grad_norm_(parameters, 100.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx([8**0.5, 20**0.5], rel=1e-6)
    found = [weight(accelerator, first)]
    accelerator.end_training()
    return found


SCENARIOS: list[tuple[Callable[..., list[float]], list[float], list[float]]] = [
    # What weights are where a scale falls, and where it grows.
    (two_windows, [-1.0, -2.0], [-2.0, -2.0]),
    (shared_encoder, [-2.0, 0.0], [-2.0, -1.0]),
    (common_parameters, [-3.0, -1.0], [-4.0, -2.0]),
    (kept_gradients, [-5.0], [-5.0]),
    (loose_parameters, [-2.0], [-2.0]),
]


def check(engines: dict[str, Any]) -> list[str]:
    """Return which scenarios went wrong, and how."""
    wrong = []
    for scenario, falls, grows in SCENARIOS:
        for expected, growing in ((falls, False), (grows, True)):
            try:
                found: Any = scenario(engines, growing)
            except AssertionError as error:
                found = repr(error)
            if found != expected:
                wrong.append(f"{scenario.__name__}(grows={growing}): {found}, not {expected}")
    return wrong


def test_gradients_follow_the_scale() -> None:
    assert check({}) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_follow_the_scale_on_two_processes(engine: str) -> None:
    assert run_distributed(check, 2, ENGINES[engine]) == [[], []]


# -- stepping without a scaled loss --------------------------------------------------------


def test_a_second_step_by_the_same_gradients_is_refused() -> None:
    accelerator = started({})
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(ONES).sum())
    optimizer.step()
    with pytest.raises(StateError, match=r"Call accelerator\.backward\(loss\) before each step"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # nothing to do, as in any precision
    assert not optimizer.step_was_skipped
    model(ONES).sum().backward()
    with pytest.raises(StateError, match=r"or come from loss\.backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(ONES).sum())
    optimizer.step()
    assert weight(accelerator, model) == -2.0


def clipped_together(engines: dict[str, Any]) -> list[float]:
    """Two optimizers that are clipped by one norm, which an overflow of the first makes NaN."""
    accelerator = started(engines)
    first, second = Net(), Net()
    first, second, *optimizers = accelerator.prepare(first, second, sgd(first), sgd(second))
    for broken in (True, False):
        factor = math.nan if broken and accelerator.is_last_process else 1.0
        loss = first(ONES).sum() * factor + second(ONES).sum()
        accelerator.backward(loss)
        parameters = [*first.parameters(), *second.parameters()]
        accelerator.clip_grad_norm_(parameters, 100.0)
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.step_was_skipped is broken
            optimizer.zero_grad()
    found = [weight(accelerator, model) for model in (first, second)]
    accelerator.end_training()
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_overflow_skips_all_that_is_clipped_with_it(engine: str) -> None:
    for found in run_distributed(clipped_together, 2, ENGINES[engine]):
        assert found == [-1.0, -1.0]
