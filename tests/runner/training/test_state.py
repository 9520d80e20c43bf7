"""R1, R2, R4: counters that move with the batch, what improves, and which ends are complete."""

from __future__ import annotations

import math

import pytest

from accel.machine.errors import ConfigError
from runner.training.state import Stop, TrainState


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
