"""Report of a failed run: the first cause, with frames of the user's code. Free of torch."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from accel.machine.errors import (
    AccelError,
    ConfigError,
    DiskFullError,
    MissingPackageError,
    text_of,
)
from runner.exit_codes import FAILED, REFUSED
from runner.recipe import user_frames
from runner.runs import directory
from runner.runs.outcomes import Outcome, describe_exit

# Messages of gloo and NCCL when another rank has ended; both raise plain RuntimeErrors.
COMMUNICATION = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|ProcessGroup|\bTCPStore\b",
    re.IGNORECASE,
)


class LoaderWorkerError(AccelError, RuntimeError):
    """A loader worker died; the message has its exit status."""


@contextlib.contextmanager
def loader_deaths_named() -> Iterator[None]:
    """Raise a `LoaderWorkerError` where torch only reports that a loader worker exited."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        from accel.data.worker_signals import failed

        ended = [f"{pid} {describe_exit(status)}" for pid, status in failed().items()]
        if not ended:
            raise
        raise LoaderWorkerError(f"a loader worker died: process {', '.join(ended)}") from error


def report(error: BaseException) -> int:
    """Print an error of the parent process on standard error, and return the exit code for it."""
    if isinstance(error, AccelError):
        print(error, file=sys.stderr)
    else:
        print("".join(user_frames.formatted(error)), end="", file=sys.stderr)
    return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error of the parent process."""
    return REFUSED if isinstance(error, (ConfigError, MissingPackageError)) else FAILED


def outcome_of(error: BaseException, rank: int) -> Outcome:
    """Return the outcome of a process that ends with `error`.

    A refused configuration and a missing package have a remedy, which a traceback would hide.
    """
    if isinstance(error, (ConfigError, MissingPackageError)):
        return Outcome(rank, time.time(), REFUSED, str(error))
    if isinstance(error, DiskFullError):
        return Outcome(rank, time.time(), FAILED, str(error))
    texts = user_frames.one_line(error), "".join(user_frames.formatted(error))
    full = "".join(traceback.format_exception(error))
    return Outcome(
        rank, time.time(), FAILED, *texts, is_consequence=_is_communication_error(error), full=full
    )


def _is_communication_error(error: BaseException) -> bool:
    """Return whether `error`, or one of its causes, is of a process group or a store."""
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


def print_failure(outcome: Outcome, run_dir: Path, num_processes: int = 1) -> None:
    """Print on standard error how a run ended."""
    if outcome.code == REFUSED:
        lines = [outcome.message]
    else:
        who = f"rank {outcome.rank} failed first" if num_processes > 1 else "the run failed"
        lines = [outcome.traceback.rstrip(), f"{who}: {outcome.message}"]
        # That of an evaluation's processes is removed.
        if not directory.is_request(run_dir):
            lines.append(f"run: {run_dir}")
    print(*(line for line in lines if line), sep="\n", file=sys.stderr, flush=True)


def print_interrupted(run_dir: Path) -> None:
    """Print on standard error that Ctrl-C interrupted a run, and the command that resumes it."""
    if directory.is_request(run_dir):
        line = "Interrupted."
    else:
        resumed = _resumed(run_dir)
        before = f"Interrupted before the first checkpoint of {run_dir}."
        line = f"Interrupted. {resumed[0]}" if resumed else before
    print(line, file=sys.stderr, flush=True)


def _resumed(run_dir: Path) -> list[str]:
    """Return how to resume a run that has a checkpoint, in a line; none: it has none."""
    if not directory.own_checkpoints(run_dir):
        return []
    command = f"runner resume={shlex.quote(str(run_dir))}"
    return [f"Resume from the last checkpoint with: {command}"]
