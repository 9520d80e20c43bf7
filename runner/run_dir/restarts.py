"""Attempts at a run that failed, in ``logs/restarts.jsonl``: the budget of restarts. Free of torch.

A line each, in the order in which they failed. The budget `distributed.max_restarts` is of the
whole run: a command that resumes it counts what earlier ones have used.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.checkpoint.directory import write_atomically
from runner.run_dir.outcomes import Outcome, log_folder

FILE = "restarts.jsonl"


@dataclass(frozen=True)
class FailedAttempt:
    """One attempt that failed.

    Attributes:
        attempt: its number in the run, from 1 on.
        time: seconds since the epoch at which it failed.
        rank: the rank that failed first.
        message: its outcome in one line.
        num_processes: processes of the attempt.
        restarted: whether the run was started again after it.
    """

    attempt: int
    time: float
    rank: int
    message: str
    num_processes: int
    restarted: bool


def read(run_dir: Path) -> list[FailedAttempt]:
    """Return the attempts at a run that failed, oldest first."""
    path = run_dir / "logs" / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [FailedAttempt(**json.loads(line)) for line in lines]


def used(run_dir: Path) -> int:
    """Return how many restarts a run has had."""
    return sum(attempt.restarted for attempt in read(run_dir))


def note(run_dir: Path, cause: Outcome, num_processes: int, restarted: bool) -> FailedAttempt:
    """Add an attempt that failed, and return it."""
    failed = FailedAttempt(
        len(read(run_dir)) + 1, cause.time, cause.rank, cause.message, num_processes, restarted
    )
    path = log_folder(run_dir) / FILE
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + json.dumps(asdict(failed)).encode() + b"\n")
    return failed
