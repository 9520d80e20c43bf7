"""What Slurm is asked for: checked before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.recipe.submit import Submit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("04:00:00", 14400), ("1-00:00:30", 86430), ("2:00:00:00", 172800)],
)
def test_a_time_limit(text: str | None, seconds: int | None) -> None:
    assert Submit(time=text).seconds == seconds


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"time": 60}, "a number could be minutes or seconds"),
        ({"time": "4h"}, "HH:MM:SS"),
        ({"time": "00:03:00"}, "no time is left to train"),
        ({"nodes": 0}, "at least 1"),
        ({"tasks_per_node": 0}, "at least 1"),
        ({"signal_delay_s": 0}, "at least 1"),
        ({"extra": ["mail-type=FAIL"]}, "each is one option of sbatch"),
        ({"extra": ["--a=1\n#SBATCH --b"]}, "each is one option of sbatch"),
        ({"extra": ["--time=1"]}, "submit.time decides"),
        ({"extra": ["--array=0-3"]}, "runner -m decides"),
        ({"setup": ["a\nb"]}, "each is one line"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Submit(**values)


def test_a_shorter_delay_leaves_time() -> None:
    assert Submit(time="00:03:00", signal_delay_s=60).seconds == 180


def test_other_options_of_sbatch_are_handed_on() -> None:
    assert Submit(extra=["--mail-type=FAIL", "-C haswell"]).extra[0] == "--mail-type=FAIL"
