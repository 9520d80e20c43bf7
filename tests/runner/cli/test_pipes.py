"""Commands whose reader closes the pipe (`| head`): they end in silence (R10)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import python
from tests.runner.written_runs import write_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("command", ["list", "show", "compare", "report --terminal"])
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


@pytest.mark.slow  # jobs that import torch
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_without_a_reader_says_which_jobs_were_not_started(
    jobs: str, tmp_path: Path
) -> None:
    line = ["-m", "debug=fdr", "seed=0,1,2", "sweep.dir=swept", f"sweep.jobs={jobs}"]
    begun = subprocess.Popen(
        python("-m", "runner", *line),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert begun.stdout is not None
    assert begun.stdout.readline().startswith("sweep: ")
    begun.stdout.close()
    _, told = begun.communicate(timeout=120)
    assert begun.returncode == 1, told
    assert "The sweep has ended early: nobody reads standard output any more." in told
    assert re.search("of 3 jobs were not started: .*0002", told)
    assert "Traceback" not in told
