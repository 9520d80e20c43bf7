"""Removal of run directories in which nothing was started. Free of torch."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.exit_codes import FAILED, OF_SIGNAL, REFUSED
from runner.run_dir import directory
from runner.run_dir.json_files import METRICS

# Of a run that SIGTERM or SIGUSR1 met while it waited for its machines.
MET_WAITING = (OF_SIGNAL + signal.SIGTERM, OF_SIGNAL + signal.SIGUSR1)
# Files that a run writes before its first step.
BEFORE_TRAINING = {
    *("config.yaml", "overrides.yaml", "job.json", "threads.json", "environment.json", "git.diff"),
    *(".lock", directory.LOGS, directory.RUN_LOG, "tensorboard", checkpoints.FOLDER),
}


def worth_keeping(run_dir: Path, code: int) -> bool:
    """Return whether a run that ended with `code` leaves anything to use or to look at.

    A refused one does if it has a checkpoint; one that failed, or that a stop signal met while it
    waited for its machines, if it has made a step, or if its processes have written logs. Files
    that are not the runner's are always kept.
    """
    if code not in (REFUSED, FAILED, *MET_WAITING):
        return True
    known = BEFORE_TRAINING | ({METRICS} if code == REFUSED else set())
    found = [path for path in run_dir.iterdir() if not path.name.startswith(".attempt-")]
    checkpoints = directory.own_checkpoints(run_dir)
    logs = any((run_dir / "logs").glob("rank_*.log")) and code != REFUSED
    return bool(checkpoints) or logs or any(path.name not in known for path in found)


def remove(run_dir: Path, code: int, *, with_parents: bool = True) -> None:
    """Remove the directory of a new run that ended with `code`, unless it is worth keeping.

    Folders above that held nothing else go along, unless a person has chosen the directory. It is
    out of sight at once: another rank that is about to write a word of its end there finds no
    directory, and makes none.
    """
    if not run_dir.is_dir() or worth_keeping(run_dir, code):
        return
    hidden = run_dir.with_name(f".{run_dir.name}.removed-{secrets.token_hex(4)}")
    run_dir.rename(hidden)
    shutil.rmtree(hidden)
    if not with_parents:
        return
    with contextlib.suppress(OSError):  # other runs lie there
        run_dir.parent.rmdir()
        run_dir.parent.parent.rmdir()
