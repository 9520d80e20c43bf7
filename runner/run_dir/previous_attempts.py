"""What attempts without a complete checkpoint have left in a run directory. Free of torch."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.run_dir.outcomes import log_folder

PREFIX = "attempt_"


def set_aside(run_dir: Path) -> None:
    """Move the files of earlier attempts to ``logs/attempt_<n>/``, so that a run begins anew.

    Logs stay where they are, and are appended to. Incomplete checkpoints are removed. Requires the
    run's lock. If the process is killed meanwhile, the next call moves the rest.
    """
    kept = ("logs", ".lock")
    left = sorted(path for path in run_dir.iterdir() if path.name not in kept)
    if not left:
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
