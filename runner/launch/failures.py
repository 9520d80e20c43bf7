"""How a run failed: the first cause, found in what its processes have left, and its report.

Free of torch.
"""

from __future__ import annotations

import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from accel.machine.errors import (
    AccelError,
    ConfigError,
    DiskFullError,
    MissingPackageError,
    text_of,
)
from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, OF_SIGNAL, REFUSED, STOPPED
from runner.launch import rank_logs
from runner.launch.group import Failure
from runner.recipe import user_frames
from runner.runs import directory, outcomes
from runner.runs.outcomes import Outcome, describe_exit
from runner.runs.sessions import run_dir_of

# Messages of gloo and NCCL when another rank has ended; both raise plain RuntimeErrors.
COMMUNICATION = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|ProcessGroup|\bTCPStore\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: the exit code of the command; of a failure, its first cause."""

    code: int
    cause: Outcome | None = None


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


def outcome_of(error: BaseException, rank: int, run_dir: Path) -> Outcome:
    """Return the outcome of a process that ends with `error`.

    A refused configuration and a missing package have a remedy, which a traceback would hide.
    """
    if isinstance(error, (ConfigError, MissingPackageError)):
        return Outcome(rank, time.time(), REFUSED, str(error))
    if isinstance(error, DiskFullError):
        return Outcome(rank, time.time(), FAILED, str(error))
    message, shown = user_frames.one_line(error), "".join(user_frames.formatted(error))
    if died := _dead_loader_workers(error):
        message, shown = f"a loader worker died: process {died}", ""
        if rank > 0:  # else it is on the terminal
            shown = "\n".join(rank_logs.crash(rank_logs.log_file(run_dir, rank)))
    is_consequence = _is_communication_error(error)
    full = "".join(traceback.format_exception(error))
    return Outcome(rank, time.time(), FAILED, message, shown, is_consequence, full)


def _dead_loader_workers(error: BaseException) -> str:
    """Return how loader workers died, of which torch only says that they exited; empty: none."""
    if not (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")):
        return ""
    from accel.data.worker_signals import failed

    return ", ".join(f"{pid} {describe_exit(status)}" for pid, status in failed().items())


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


def outcomes_of(folder: Path, failed: Mapping[int, Failure]) -> list[Outcome]:
    """Return how the processes of a session ended.

    Of the ranks that `failed`, those that have left no word were killed, or died in native code.
    """
    left = outcomes.read_outcomes(folder)
    silent = failed.keys() - {outcome.rank for outcome in left}
    return [*left, *(_outcome_from_status(run_dir_of(folder), n, failed[n]) for n in silent)]


def conclude(found: Sequence[Outcome]) -> Ended:
    """Return how an attempt ended, from how its processes did."""
    causes = [outcome for outcome in found if outcome.code not in CLEAN]
    if not causes:
        return Ended(STOPPED if any(outcome.code == STOPPED for outcome in found) else DONE)
    # The end of one rank causes errors of communication on the others, perhaps recorded earlier.
    cause = min(causes, key=lambda outcome: (outcome.is_consequence, outcome.time))
    return Ended(cause.code, cause)


def _outcome_from_status(run_dir: Path, rank: int, failure: Failure) -> Outcome:
    status = failure.status
    if status == INTERRUPTED:  # SIGINT was sent only to this process
        return Outcome(rank, failure.time, INTERRUPTED, "it was interrupted")
    log = rank_logs.log_file(run_dir, rank)
    printed = rank_logs.tail(log)
    message = f"its process {describe_exit(status)}"
    hangs = status == FAILED and any(line.startswith(rank_logs.TIMED_OUT) for line in printed)
    if hangs:
        message = "it hangs: native code keeps the interpreter"
    if status == DONE:
        message += " before the run was complete"
    return Outcome(
        rank=rank,
        time=failure.time,
        code=FAILED,
        message=message,
        traceback="\n".join([f"The end of {log}:", *printed]) if printed else "",
        # Native code aborts where another rank has ended, and where another hangs, ranks exit.
        is_consequence=status == -signal.SIGABRT or (status == FAILED and not hangs),
    )


def stopped_while_waiting(run_dir: Path, number: int) -> Ended:
    """Return how a run ends that a stop signal meets while it waits for its machines."""
    if directory.newest_checkpoint(run_dir) is not None:  # it waits again, after a failure
        return Ended(STOPPED)
    name = signal.Signals(number).name
    print(f"{name} came before training began: nothing is saved.", file=sys.stderr, flush=True)
    return Ended(OF_SIGNAL + number)


def report_end(ended: Ended, run_dir: Path, num_processes: int) -> None:
    """Print how an attempt ended, unless it is complete or stopped."""
    if ended.code == INTERRUPTED:
        print_interrupted(run_dir)
    elif ended.cause is not None:
        print_failure(ended.cause, run_dir, num_processes)


def print_failure(
    outcome: Outcome, run_dir: Path, num_processes: int = 1, stream: TextIO | None = None
) -> None:
    """Print how a run ended, on standard error unless another stream is given."""
    if outcome.code == REFUSED:
        lines = [outcome.message]
    else:
        who = f"rank {outcome.rank} failed first" if num_processes > 1 else "the run failed"
        lines = [outcome.traceback.rstrip(), f"{who}: {outcome.message}"]
        # That of an evaluation's processes is removed.
        if not directory.is_request(run_dir):
            lines.append(f"run: {run_dir}")
    print(*(line for line in lines if line), sep="\n", file=stream or sys.stderr, flush=True)


def print_interrupted(run_dir: Path) -> None:
    """Print on standard error that Ctrl-C interrupted a run, and the command that resumes it."""
    if directory.is_request(run_dir):
        line = "Interrupted."
    elif not directory.own_checkpoints(run_dir):
        line = f"Interrupted before the first checkpoint of {run_dir}."
    else:
        command = directory.resume_command(str(run_dir))
        line = f"Interrupted. Resume from the last checkpoint with: {command}"
    print(line, file=sys.stderr, flush=True)
