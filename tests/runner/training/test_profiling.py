"""The profiler that a recipe switches on."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.config.handlers import ProfileKwargs
from tests.runner.loops import (
    recipe_of,
    run,
)


@pytest.mark.parametrize("folder", [None, "traces"])
def test_a_profile_lies_in_the_run_directory(tmp_path: Path, folder: str | None) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    profile = ProfileKwargs(schedule_option=schedule, output_trace_dir=folder)
    run(tmp_path, recipe_of(trainer__epochs=1, profile=profile))
    assert list((tmp_path / (folder or "profile")).iterdir())
