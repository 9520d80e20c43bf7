"""Counters, durations, meters and checkpoints' pointers: the parts of the loop by themselves.

Holds R2.
"""

from __future__ import annotations

import pytest

from accel.machine.errors import CheckpointError, ConfigError
from runner.training.state import Stop, TrainState


def test_a_state_comes_back_whole_or_not_at_all() -> None:
    state = TrainState(step=3, best=0.5, best_step=2)
    copy = TrainState()
    copy.load_state_dict(state.state_dict())
    assert copy == state
    renamed = state.state_dict()
    renamed["steps"] = renamed.pop("step")
    with pytest.raises(CheckpointError, match=r"lacks \['step'\] and has \['steps'\]"):
        copy.load_state_dict(renamed)


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
