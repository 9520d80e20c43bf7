"""How a process of a run ended, left as a small file, so that the parent can name the first cause.

A group of processes ends in a cascade: one fails, the others then fail in the exchange with it. The
elastic agent sees only which one exited first. Each process therefore writes down what happened
with the time at which it happened; the earliest entry is the cause.

Free of torch.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.errors import (
    ConfigError,
    DiskFullError,
    MissingPackageError,
    text_of,
)
from runner.config import paths, user_frames

DONE = 0
FAILED = 1
REFUSED = 2
STOPPED = 75
INTERRUPTED = 130
# What a parent reads from an exit status: a worker that stopped with its state saved did not fail.
CLEAN = (DONE, STOPPED)
# What gloo and NCCL say when another process is gone; both raise plain RuntimeErrors.
COMMUNICATION = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|ProcessGroup|\bTCPStore\b",
    re.IGNORECASE,
)
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
        is_consequence: whether it is an error of communication, as the end of another rank causes.
        full: the whole traceback, for the log.
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

        Where the run directory is gone, nothing was started, and rank 0 has told why. Where the
        disk is full, it goes to the system's folder for temporary files.
        """
        if not run_dir.is_dir():
            return
        name = f"{launch}_rank_{self.rank}.json"
        try:
            self._write(log_folder(run_dir) / name)
        except FileNotFoundError:
            if run_dir.is_dir():
                raise
        except OSError as error:
            if error.errno not in paths.FULL:
                raise
            self._write(Path(tempfile.gettempdir()) / name)  # read and removed from there

    def _write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(self)))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, run_dir: Path, launch: str) -> None:
        """Remove what `write` has written, if it is there."""
        (log_folder(run_dir) / f"{launch}_rank_{self.rank}.json").unlink(missing_ok=True)


def how(status: int) -> str:
    """Return in words how a process ended, by its exit status."""
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


def note_hang(run_dir: Path, launch: str, hang: Outcome | None) -> None:
    """Write down which rank hangs, for the parent; None: none does any more."""
    path = log_folder(run_dir) / f"{launch}_hang.json"
    if hang is None:
        path.unlink(missing_ok=True)
    else:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(hang)))
        os.replace(partial, path)


def read_hang(run_dir: Path, launch: str) -> Outcome | None:
    """Return which rank of a launch hung at its end; None: none did."""
    path = log_folder(run_dir) / f"{launch}_hang.json"
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def read_outcomes(run_dir: Path, launch: str) -> list[Outcome]:
    """Return what the processes of one launch left, earliest first."""
    pattern = f"{launch}_rank_*.json"
    elsewhere = list(Path(tempfile.gettempdir()).glob(pattern))
    files = [*log_folder(run_dir).glob(pattern), *elsewhere]
    found = [Outcome(**json.loads(file.read_text())) for file in files]
    for file in elsewhere:
        file.unlink()
    return sorted(found, key=lambda outcome: outcome.time)


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
    if isinstance(error, DiskFullError):
        return Outcome(rank, time.time(), FAILED, str(error))
    if isinstance(error, BrokenPipeError) and nobody_reads():
        return Outcome(rank, time.time(), FAILED, UNREAD)
    told = user_frames.one_line(error), "".join(user_traceback(error))
    full = "".join(traceback.format_exception(error))
    return Outcome(
        rank, time.time(), FAILED, *told, is_consequence=_of_communication(error), full=full
    )


def order(causes: Iterable[Outcome]) -> list[Outcome]:
    """Return how processes ended, the first cause first.

    The end of one rank causes errors of communication on the others, which may be told before that
    end is seen. So these come last.
    """
    return sorted(causes, key=lambda outcome: (outcome.is_consequence, outcome.time))


def _of_communication(error: BaseException) -> bool:
    """Return whether `error`, or what it was raised from, is of a process group or a store."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, RuntimeError) and (
            any(kind.__name__ == "_DistError" for kind in type(found).__mro__)
            or COMMUNICATION.search(text_of(found))
        ):
            return True
        found = found.__cause__ or found.__context__
    return False


def user_traceback(error: BaseException) -> list[str]:
    """Return the formatted traceback and its causes: the user's own frames, where it has any."""
    return user_frames.formatted(error)


def tell(outcome: Outcome, run_dir: Path, num_processes: int = 1) -> None:
    """Say on standard error how a run ended, once."""
    from runner.run_dir import abandoned

    if outcome.message == UNREAD:
        return
    if outcome.code == REFUSED:
        lines = [outcome.message]
    else:
        who = f"rank {outcome.rank} failed first" if num_processes > 1 else "the run failed"
        lines = [outcome.traceback.rstrip(), f"{who}: {outcome.message}"]
        if abandoned.worth_keeping(run_dir, outcome.code):
            lines.append(f"run: {run_dir}")
    print(*(line for line in lines if line), sep="\n", file=sys.stderr, flush=True)


def tell_interrupted(run_dir: Path) -> None:
    """Say on standard error that a run was cut off by Ctrl-C, and how it goes on."""
    from runner.run_dir import directory

    if directory.own_checkpoints(run_dir):
        command = f"runner resume={shlex.quote(str(run_dir))}"
        line = f"Interrupted. From its last checkpoint the run goes on with: {command}"
    else:
        line = f"Interrupted before the first checkpoint of {run_dir}."
    print(line, file=sys.stderr, flush=True)
