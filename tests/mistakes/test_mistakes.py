"""C1: mistakes are refused with a useful answer: a few fixed ones, and many by a fresh seed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.helpers import SECONDS

ROOT = Path(__file__).resolve().parents[2]
MANY = int(os.environ.get("MISTAKES", "300"))  # 60 in CI
COUNTS = [
    pytest.param(4, ("--seed", "1"), id="few"),
    pytest.param(0, ("--found",), marks=pytest.mark.slow, id="found"),
    pytest.param(MANY, (), marks=(pytest.mark.slow, pytest.mark.timeout(1800)), id="many"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="answers are collected from forks")
@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_mistakes_are_answered(count: int, seed: tuple[str, ...]) -> None:
    answer = commands.run(
        *("-m", "tests.mistakes", "--count", str(count), *seed),
        cwd=ROOT,
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=SECONDS * (1 if count < 50 else 5),
    )
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    print(answer.stdout.splitlines()[-1])
