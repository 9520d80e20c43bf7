"""Counters, durations, meters and checkpoints' pointers: the parts of the loop by themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from accel.comm.local import LocalCommunicator
from accel.errors import CheckpointError, ConfigError
from runner.config.durations import parse_duration
from runner.training.checkpointing import Best, RunState, read_best
from runner.training.metrics import NonFiniteError, StepMeter, Stopwatch
from runner.training.state import Stop, TrainState


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (90, 90.0),
        (0.5, 0.5),
        ("00:01:30", 90.0),
        ("36:00:00", 129_600.0),
        ("2:00:00:01", 172_801.0),
    ],
)
def test_durations(value: object, seconds: float | None) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["1h", "90", 0, -1, True, "00:61:00", [1]])
def test_a_duration_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time=.*HH:MM:SS"):
        parse_duration(value)


def test_the_epoch_number_is_that_of_the_last_step() -> None:
    state = TrainState()
    assert state.epoch_number == 0
    state.advance(8)
    assert (state.epoch_number, state.samples, state.samples_in_epoch) == (1, 8, 8)
    state.advance(4)
    state.end_epoch()
    assert (state.epoch_number, state.epoch, state.step_in_epoch) == (1, 1, 0)
    state.advance(8)
    assert (state.epoch_number, state.samples, state.samples_in_epoch) == (2, 20, 8)


def test_a_state_comes_back_whole_or_not_at_all() -> None:
    state = TrainState(step=3, best=0.5, best_step=2)
    copy = TrainState()
    copy.load_state_dict(state.state_dict())
    assert copy == state
    renamed = state.state_dict()
    renamed["steps"] = renamed.pop("step")
    with pytest.raises(CheckpointError, match=r"lacks \['step'\] and has \['steps'\]"):
        copy.load_state_dict(renamed)


@pytest.mark.parametrize(
    ("best", "value", "mode", "better"),
    [
        (None, 1.0, "max", True),
        (1.0, 2.0, "max", True),
        (1.0, 2.0, "min", False),
        (1.0, 1.0, "max", False),
        (None, math.nan, "max", False),
    ],
)
def test_what_improves(best: float | None, value: float, mode: str, better: bool) -> None:
    assert TrainState(best=best).improves(value, mode) is better


def test_a_position_moves_to_another_global_batch_if_it_fits() -> None:
    state = TrainState(step=3, step_in_epoch=3, samples_in_epoch=24)
    state.move_to(6)
    assert state.step_in_epoch == 4
    with pytest.raises(ConfigError, match=r"global_batch_size=5.*24 samples"):
        state.move_to(5)
    TrainState(epoch=2).move_to(5)  # at the beginning of an epoch everything fits


def test_which_ends_are_complete() -> None:
    kinds = ("max_steps", "epochs", "max_time", "callback", "stop_after", "signal")
    assert [kind for kind in kinds if Stop(kind, "").complete] == list(kinds[:4])


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


def test_parts_of_a_run_are_stored_by_name() -> None:
    one, two = TrainState(step=1), TrainState(step=2)
    saved = RunState({"one": one, "two": two}).state_dict()
    found = RunState({"two": TrainState(), "three": TrainState()})
    found.load_state_dict(saved)
    assert found.parts["two"] == two
    assert (found.added, found.dropped) == (["three"], ["one"])


def test_the_pointer_names_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    best = Best("checkpoint_3", 15, "accuracy", 0.9)
    best.write(tmp_path)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "checkpoint_3"
    assert read_best(tmp_path) is None
    (tmp_path / "checkpoint_3").mkdir()
    assert read_best(tmp_path) == best
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json"):
        read_best(tmp_path)
