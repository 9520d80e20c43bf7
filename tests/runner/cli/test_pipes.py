"""Commands whose reader closes the pipe (`| head`): they end in silence (R10)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import python
from tests.runner.written_runs import write_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("command", ["list", "show", "compare"])
def test_a_reader_that_is_gone_gets_no_error(command: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, {"name": name}, metrics=2)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            python("-m", "runner", *command.split(), "runs"),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1
