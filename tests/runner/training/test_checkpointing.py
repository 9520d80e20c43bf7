"""Which checkpoint is the best, and the parts of a run that a checkpoint holds (R4)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from accel.machine.errors import CheckpointError
from runner.training.checkpointing import Best, read_best
from runner.training.state import TrainState


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
