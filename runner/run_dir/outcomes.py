"""How a process of a run ended, written to a small file, so that the parent can name the cause.

A group of processes ends in a cascade: one fails, then the others in their collectives with it. The
elastic agent sees only which one exited first. Each process therefore writes its outcome with
the time at which it occurred; the earliest entry is the cause.

Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.checkpoint.directory import write_atomically
from runner.recipe import paths
from runner.run_dir.json_files import write_json

RESTARTS = "restarts.jsonl"


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
        rank: the process.
        time: seconds since the epoch at which it happened.
        code: exit code of the command: 1 failed, 2 refused, 75 stopped with state saved.
        message: the outcome in one line.
        traceback: reduced to the user's frames; empty where it would not help.
        is_consequence: whether it is an error of communication, as the end of another rank causes.
        full: the full traceback, for the log.
    """

    rank: int
    time: float
    code: int
    message: str
    traceback: str = ""
    is_consequence: bool = False
    full: str = ""

    def write(self, run_dir: Path, launch: str) -> None:
        """Write this to ``<run_dir>/logs/<launch>_rank_<rank>.json``.

        Without the run directory, nothing was started, and rank 0 has reported the reason. On a
        full disk, it goes to the system's folder for temporary files.
        """
        if not run_dir.is_dir():
            return
        name = f"{launch}_rank_{self.rank}.json"
        try:
            write_json(log_folder(run_dir) / name, asdict(self))
        except FileNotFoundError:
            if run_dir.is_dir():
                raise
        except OSError as error:
            if error.errno not in paths.FULL:
                raise
            write_json(Path(tempfile.gettempdir()) / name, asdict(self))  # read and removed there

    def remove(self, run_dir: Path, launch: str) -> None:
        """Remove the file that `write` has written, if it exists."""
        (log_folder(run_dir) / f"{launch}_rank_{self.rank}.json").unlink(missing_ok=True)


def describe_exit(status: int) -> str:
    """Describe how a process ended, by its exit status."""
    if status >= 0:
        return f"exited with {status}"
    likely = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{likely}"


def new_launch() -> str:
    """Return a new name for the files that the workers of one attempt leave."""
    return f"launch_{uuid.uuid4().hex[:8]}"


def log_folder(run_dir: Path) -> Path:
    """Return the run's folder for logs; make it where it is not there.

    Raises:
        FileNotFoundError: if there is no run directory (any more).
    """
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def note_hang(run_dir: Path, launch: str, hang: Outcome | None) -> None:
    """Write down which rank hangs, for the parent; None: none does any more."""
    path = log_folder(run_dir) / f"{launch}_hang.json"
    if hang is None:
        path.unlink(missing_ok=True)
    else:
        write_json(path, asdict(hang))


def read_hang(run_dir: Path, launch: str) -> Outcome | None:
    """Return which rank of a launch hung at its end; None: none did."""
    path = log_folder(run_dir) / f"{launch}_hang.json"
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def note_processes(run_dir: Path, launch: str, pids: Mapping[int, int]) -> None:
    """Write down the processes of this machine's ranks, before they say anything themselves."""
    if not pids:
        return
    found = {rank: f"{socket.gethostname()} {pid}" for rank, pid in pids.items()}
    with contextlib.suppress(OSError):  # a full disk; the watchdog then says less
        write_json(log_folder(run_dir) / f"{launch}_processes_{min(pids)}.json", found)


def read_processes(run_dir: Path, launch: str) -> dict[int, str]:
    """Return host and process id of the ranks of a launch, as far as they were noted."""
    found: dict[int, str] = {}
    for file in (run_dir / "logs").glob(f"{launch}_processes_*.json"):
        found |= {int(rank): who for rank, who in json.loads(file.read_text()).items()}
    return found


def forget_processes(run_dir: Path, launch: str) -> None:
    """Remove what `note_processes` has written."""
    for file in (run_dir / "logs").glob(f"{launch}_processes_*.json"):
        file.unlink(missing_ok=True)


def read_outcomes(run_dir: Path, launch: str) -> list[Outcome]:
    """Return the outcomes of the processes of one launch, earliest first."""
    pattern = f"{launch}_rank_*.json"
    elsewhere = list(Path(tempfile.gettempdir()).glob(pattern))
    files = [*log_folder(run_dir).glob(pattern), *elsewhere]
    found = [Outcome(**json.loads(file.read_text())) for file in files]
    for file in elsewhere:
        file.unlink()
    return sorted(found, key=lambda outcome: outcome.time)


# -- the budget of restarts ----------------------------------------------------------------
# Attempts that failed are lines of logs/restarts.jsonl. The budget `distributed.max_restarts` is of
# the whole run: a command that resumes it counts what earlier ones have used.


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


def read_failed(run_dir: Path) -> list[FailedAttempt]:
    """Return the attempts at a run that failed, oldest first."""
    path = run_dir / "logs" / RESTARTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [FailedAttempt(**json.loads(line)) for line in lines]


def restarts_used(run_dir: Path) -> int:
    """Return how many restarts a run has had."""
    return sum(attempt.restarted for attempt in read_failed(run_dir))


def note_failed(
    run_dir: Path, cause: Outcome, num_processes: int, restarted: bool
) -> FailedAttempt:
    """Add an attempt that failed, and return it."""
    failed = FailedAttempt(
        len(read_failed(run_dir)) + 1,
        cause.time,
        cause.rank,
        cause.message,
        num_processes,
        restarted,
    )
    path = log_folder(run_dir) / RESTARTS
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + json.dumps(asdict(failed)).encode() + b"\n")
    return failed
