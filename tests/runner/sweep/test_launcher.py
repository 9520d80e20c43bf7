"""The launcher of a sweep: its processes end with the command."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.plugins import Plugins

from accel.machine import parent_watch
from runner.sweep.launcher import instantiate_launcher
from tests.helpers import SECONDS, python
from tests.runner.sweep.kills import ROOT, descendants, require_ended
from tests.runner.sweep.test_kills import QUICK


@pytest.mark.parametrize("launcher", [SimpleNamespace(joblib={"n_jobs": 2}), SimpleNamespace()])
def test_workers_of_joblib_watch_the_command(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plugins.instance(), "instantiate_launcher", lambda **given: launcher)
    nothing: Any = None
    found: Any = instantiate_launcher(hydra_context=nothing, task_function=nothing, config=nothing)
    assert found is launcher
    if hasattr(launcher, "joblib"):
        watch = {"initializer": parent_watch.die_with, "initargs": (os.getpid(),)}
        assert launcher.joblib == {"n_jobs": 2, **watch}


@pytest.mark.slow
def test_a_worker_without_a_job_ends_with_the_command(tmp_path: Path) -> None:
    where = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    command = python("-m", "runner", "-m", "seed=0", *where, "trainer.max_steps=1000", *QUICK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as sweep:
        deadline = time.monotonic() + SECONDS
        while not list(tmp_path.glob("runs/*/sweep-*/0*/metrics.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = descendants(sweep.pid)
        sweep.kill()
    assert len(below) > 2
    require_ended(below)
