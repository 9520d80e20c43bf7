"""The objects of a run as they are prepared (R1, E5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.config.handlers import ProfileKwargs
from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from tests.runner.loops import (
    NUM_VALIDATION,
    Points,
    Stream,
    recipe_of,
    records,
    run,
)


def test_a_stream_of_unknown_length_is_trained_on_epoch_by_epoch(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2)
    data = Data(Stream(20), Points(NUM_VALIDATION))
    summary = run(tmp_path, recipe, data=data, make_scheduler=None)
    assert (summary["stopped"], summary["epoch"], summary["samples"]) == ("epochs", 2, 40)
    assert [record["step"] for record in records(tmp_path, "validation")] == [3, 6]
    with pytest.raises(ConfigError, match="schedule needs the number of steps"):
        run(tmp_path / "planned", recipe, data=data)


@pytest.mark.parametrize("folder", [None, "traces"])
def test_a_profile_lies_in_the_run_directory(tmp_path: Path, folder: str | None) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    profile = ProfileKwargs(schedule_option=schedule, output_trace_dir=folder)
    run(tmp_path, recipe_of(trainer__epochs=1, profile=profile))
    assert list((tmp_path / (folder or "profile")).iterdir())
