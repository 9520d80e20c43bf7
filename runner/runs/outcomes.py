"""How a process of a run ended, written to a small file, so that the parent can name the cause.

A group of processes ends in a cascade: one fails, then the others in their collectives with it. The
parent sees only which one exited first. Each process therefore writes its outcome with
the time at which it occurred; the earliest entry is the cause.

Free of torch.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.recipe import paths
from runner.runs.json_files import write_json


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

    def write(self, folder: Path) -> bool:
        """Write this to ``<folder>/rank_<rank>.json``; `folder` is that of the session.

        Without it, nothing was started, and rank 0 has reported the reason.

        Returns:
            Whether it could be written: the disk may be full.
        """
        try:
            if folder.is_dir():
                write_json(folder / f"rank_{self.rank}.json", asdict(self))
        except FileNotFoundError:
            if folder.is_dir():
                raise
        except OSError as error:
            if error.errno not in paths.FULL:
                raise
            return False
        return True


def describe_exit(status: int) -> str:
    """Describe how a process ended, by its exit status."""
    if status >= 0:
        return f"exited with {status}"
    likely = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{likely}"


def log_folder(run_dir: Path) -> Path:
    """Return the run's folder for logs; make it where it is not there.

    Raises:
        FileNotFoundError: if there is no run directory (any more).
    """
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def read_outcomes(folder: Path) -> list[Outcome]:
    """Return the outcomes of the processes of a session, earliest first."""
    found = [Outcome(**json.loads(file.read_text())) for file in folder.glob("rank_*.json")]
    return sorted(found, key=lambda outcome: outcome.time)


def is_left(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank has written its outcome."""
    return any(outcome.rank == rank for outcome in read_outcomes(folder))
