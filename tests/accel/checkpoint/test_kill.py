"""SIGKILL at every file operation of a save: a complete state is always there to resume from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import commands

ROOT = Path(__file__).resolve().parents[3]


def killed_everywhere(tmp_path: Path, into: str) -> list[dict[str, Any]]:
    command = ("-m", "tests.accel.checkpoint.killed_saver", str(tmp_path / "run"), into)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = commands.run(*command, cwd=ROOT, environment=environment)
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.parametrize("into", [pytest.param("new", marks=pytest.mark.slow), "existing"])
def test_a_kill_at_any_step_leaves_a_complete_state(tmp_path: Path, into: str) -> None:
    found = killed_everywhere(tmp_path, into)
    assert len(found) > 20
    assert [entry["killed"] for entry in found] == [True] * (len(found) - 1) + [False]
    states = [entry["state"] for entry in found]
    assert set(states) == {"old", "new"}
    # Old until the commit, new from then on: never nothing, never back again.
    assert states == sorted(states, reverse=True)
    assert any(entry["repaired"] for entry in found) == (into == "existing")
