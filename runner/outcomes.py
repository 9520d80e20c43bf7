"""How a process of a run ended, left as a small file, so that the parent can name the first cause.

A group of processes ends in a cascade: one fails, the others then fail in the exchange with it. The
elastic agent sees only which one exited first. Each process therefore writes down what happened
with the time at which it happened; the earliest entry is the cause.

Free of torch.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.errors import AccelError, ConfigError, MissingPackageError
from runner import frames

DONE = 0
FAILED = 1
REFUSED = 2
STOPPED = 75
INTERRUPTED = 130
# What a parent reads from an exit status: a worker that stopped with its state saved did not fail.
CLEAN = (DONE, STOPPED)
UNREAD = "nobody reads standard output any more"


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
        rank: the process.
        time: seconds since the epoch at which it happened.
        code: exit code of the command: 1 failed, 2 refused, 75 stopped with state saved.
        message: one line on what happened.
        traceback: where it happened; empty where that is of no use to a person.
    """

    rank: int
    time: float
    code: int
    message: str
    traceback: str = ""

    def write(self, run_dir: Path, launch: str) -> None:
        """Write this to ``<run_dir>/logs/<launch>_rank_<rank>.json``."""
        path = log_folder(run_dir) / f"{launch}_rank_{self.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, path)


def log_folder(run_dir: Path) -> Path:
    """Return the run's folder for logs; make it where it is not there."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_outcomes(run_dir: Path, launch: str) -> list[Outcome]:
    """Return what the processes of one launch left, earliest first."""
    files = log_folder(run_dir).glob(f"{launch}_rank_*.json")
    return sorted((Outcome(**json.loads(file.read_text())) for file in files), key=lambda o: o.time)


def nobody_reads() -> bool:
    """Return whether whoever read standard output is gone, as `head` is after its lines."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # it is no file, or closed; Windows has no poll
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def of_error(error: BaseException, rank: int) -> Outcome:
    """Return the outcome of a process that ends with `error`.

    A refused configuration and a missing package say what to do; a traceback would only hide it.
    """
    if isinstance(error, (ConfigError, MissingPackageError)):
        return Outcome(rank, time.time(), REFUSED, str(error))
    if isinstance(error, BrokenPipeError) and nobody_reads():
        return Outcome(rank, time.time(), FAILED, UNREAD)
    return Outcome(rank, time.time(), FAILED, one_line(error), "".join(user_traceback(error)))


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    text = str(error).strip()
    name = type(error).__name__
    if isinstance(error, AccelError):
        return text
    return f"{name}: {text.splitlines()[0]}" if text else name


def user_traceback(error: BaseException) -> list[str]:
    """Return the formatted traceback and its causes: the user's own frames, where it has any."""
    return frames.formatted(error)


def tell(outcome: Outcome, run_dir: Path, num_processes: int = 1) -> None:
    """Say on standard error how a run ended, once."""
    if outcome.message == UNREAD:
        return
    if outcome.code == REFUSED:
        lines = [outcome.message]
    else:
        who = f"rank {outcome.rank} failed first" if num_processes > 1 else "the run failed"
        lines = [outcome.traceback.rstrip(), f"{who}: {outcome.message}", f"run: {run_dir}"]
    print(*(line for line in lines if line), sep="\n", file=sys.stderr, flush=True)


def tell_interrupted(run_dir: Path) -> None:
    """Say on standard error that a run was cut off by Ctrl-C, and how it goes on."""
    if any(run_dir.glob("checkpoints/checkpoint_*")):
        command = f"runner resume={shlex.quote(str(run_dir))}"
        line = f"Interrupted. From its last checkpoint the run goes on with: {command}"
    else:
        line = f"Interrupted before the first checkpoint of {run_dir}."
    print(line, file=sys.stderr, flush=True)
