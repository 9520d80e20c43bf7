"""Losses kept on the device until they are logged, and the time of steps."""

from __future__ import annotations

import math

import pytest
import torch

from accel.comm.local import LocalCommunicator
from accel.machine.errors import CheckpointError
from runner.training.metrics import NonFiniteError, StepMeter, Stopwatch


def test_a_meter_averages_what_it_read() -> None:
    meter = StepMeter(LocalCommunicator())
    assert meter.empty
    for step in range(1, 5):
        values = {"loss": torch.tensor(float(step))}
        meter.add(values if step % 2 else {**values, "extra": torch.tensor(7.0, dtype=torch.half)})
    meter.drain()
    assert meter.take() == {"loss": 2.5, "extra": 7.0}
    assert meter.empty


def test_a_meter_is_saved_only_when_it_was_read() -> None:
    meter = StepMeter(LocalCommunicator())
    meter.add({"loss": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="before drain"):
        meter.state_dict()
    meter.drain()
    other = StepMeter(LocalCommunicator())
    other.load_state_dict(meter.state_dict())
    other.add({"loss": torch.tensor(3.0)})
    other.drain()
    assert other.take() == {"loss": 2.0}


def test_a_meter_names_the_step_that_is_not_finite() -> None:
    meter = StepMeter(LocalCommunicator())
    for value in (1.0, math.inf, 2.0):
        meter.add({"loss": torch.tensor(value)})
    meter.drain()
    with pytest.raises(NonFiniteError, match="loss=inf at step 9:"):
        meter.check(step=10)
    assert meter.take() == {"loss": 1.5, "loss_nonfinite": 1.0}


def test_pauses_are_left_out_of_a_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("runner.training.metrics.time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] = 3.0
    with watch.paused():
        now[0] = 10.0
    now[0] = 11.0
    assert (watch.lap(), watch.training, watch.elapsed) == (4.0, 4.0, 11.0)
    now[0] = 12.0
    assert (watch.lap(), watch.training) == (1.0, 5.0)
