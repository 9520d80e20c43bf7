"""Weights in bf16: small updates with and without stochastic rounding, equal replicas, resumes.

Holds E3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.errors import ConfigError
from accel.precision.fp8 import import_torchao
from accel.precision.rounding_adamw import RoundingAdamW
from accel.utils import set_seed
from tests.accel.precision.float8 import needs_torchao
from tests.helpers import run_distributed

pytestmark = needs_torchao
STEP = 2.0**-10  # of a weight of 1.5, whose neighbours in bf16 are 2**-7 apart


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Let torchao's optimizers step without compiling: it takes seconds for each size."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with eager():
        yield


def adamw(model: torch.nn.Module, rounds: bool = True, **options: Any) -> torch.optim.Optimizer:
    kind: Any = import_torchao("torchao.optim")._AdamW
    made: torch.optim.Optimizer = kind(
        model.parameters(), **{"lr": 1e-2, **options}, bf16_stochastic_round=rounds
    )
    return made


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8)
    )
    return model.to(torch.bfloat16)


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * 10 + accelerator.process_index)
        batch = torch.randn(4, 8, generator=generator).to(torch.bfloat16)
        accelerator.backward(model(batch).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [True, False])
def test_an_update_below_half_a_unit_is_kept_in_the_mean_or_lost(rounds: bool) -> None:
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    layer.weight.data.fill_(1.5)
    made = adamw(layer, rounds, lr=STEP, weight_decay=0.0)
    layer, optimizer = accelerator.prepare(layer, made)
    for _ in range(64):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    found = layer.weight.detach().float()
    if not rounds:
        assert torch.equal(found, torch.full_like(found, 1.5))
        return
    # A step's rounding is off by less than 2**-7, in the mean square by half of that at most; 64
    # steps add up as √64, and the mean over 4096 weights divides by √4096.
    deviation = 2**-8 * 64**0.5 / 4096**0.5
    assert found.mean().item() == pytest.approx(1.5 - 64 * STEP, abs=5 * deviation)
    assert found.std() > 0


def test_a_step_draws_nothing_from_the_run() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, adamw(model))
    train(accelerator, model, optimizer, range(1))
    model(torch.zeros(1, 8, dtype=torch.bfloat16)).sum().backward()
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_updates_that_are_lost_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "SGD updates weights in bf16, rounded to the nearest" in caplog.text
    assert "bf16_stochastic_round=True" in caplog.text


# -- replicas and checkpoints ------------------------------------------------------------------


def run(folder: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights in mid-run, at the end, and at the end of a run that was resumed."""
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=True)
    with eager():
        model = network()
        set_seed(3, device_specific=True)
        optimizer = adamw(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        train(accelerator, model, optimizer, range(3))
        middle = weights(model)
        accelerator.save_state(f"{folder}/state")
        train(accelerator, model, optimizer, range(3, 6))
        end = weights(model)
        accelerator.free_memory()
        again = network()
        again, optimizer = accelerator.prepare(again, adamw(again))
        accelerator.load_state(f"{folder}/state")
        train(accelerator, again, optimizer, range(3, 6))
        resumed = weights(again)
    accelerator.end_training()
    return middle, end, resumed


def test_replicas_stay_equal_and_resume(tmp_path: Path) -> None:
    first, second = run_distributed(run, 2, str(tmp_path))
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(first[1], first[2])


# -- weights in bf16 after `prepare` -------------------------------------------------------------


def test_a_closure_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    _, optimizer = accelerator.prepare(model, RoundingAdamW(model.parameters()))
    with pytest.raises(ConfigError, match="Compute the loss before"):
        optimizer.step(lambda: 0.0)
