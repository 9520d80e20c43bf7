"""What attempts without a complete checkpoint have left in a run directory. Free of torch."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.run_dir import provenance, slurm_job
from runner.run_dir.atomic_update import CONFIG
from runner.run_dir.job import JOB, OVERRIDES
from runner.run_dir.outcomes import log_folder

PREFIX = "attempt_"
FROZEN = {CONFIG, OVERRIDES, JOB, provenance.ENVIRONMENT, provenance.DIFF}
KEPT = ("logs", ".lock", slurm_job.FILE, slurm_job.SCRIPT)


def set_aside(run_dir: Path) -> None:
    """Move the files of earlier attempts to ``logs/attempt_<n>/``, so that a run begins anew.

    Logs stay where they are, and are appended to. Incomplete checkpoints are removed. A job that
    was frozen and never started has left nothing. Requires the run's lock. If the process is killed
    meanwhile, the next call moves the rest.
    """
    left = sorted(path for path in run_dir.iterdir() if path.name not in KEPT)
    if {path.name for path in left} <= FROZEN:
        return
    folder = _new_folder(log_folder(run_dir))
    for path in left:
        if path.name == checkpoints.FOLDER:
            shutil.rmtree(path)
        else:
            os.rename(path, folder / path.name)


def _new_folder(logs: Path) -> Path:
    for number in itertools.count(1):
        folder = logs / f"{PREFIX}{number}"
        if not folder.exists():
            folder.mkdir()
            return folder
    raise AssertionError("itertools.count has no end")
