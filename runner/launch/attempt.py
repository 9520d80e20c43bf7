"""One attempt at a job in worker processes: their command, and the cause of their end.

Free of torch at import.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, OF_SIGNAL, STOPPED
from runner.launch import bootstrap, failures, rank_logs
from runner.launch.worker_group import Failure, Place, StopSignals, WorkerGroup
from runner.runs import directory, outcomes
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TRAIN = "runner.launch.worker:run"
WORKER = "runner.launch.worker"  # its `main` is each process


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: the exit code of the command; of a failure, its first cause."""

    code: int
    cause: Outcome | None = None


class Machines(Protocol):
    """Where the workers of a run are started."""

    num_processes: int

    def attempt(self, folder: Path, stops: StopSignals) -> Ended:
        """Run the job in `folder` once, and return how it ended.

        Raises:
            KeyboardInterrupt: on Ctrl-C, when no process is left.
        """
        ...

    def finish(self, ended: Ended) -> None:
        """Release what waits for another attempt: there is none."""
        ...


class ThisMachine:
    """All workers run on this machine; code in `cwd`, the user's directory, can be imported.

    Each worker calls `target` (``module:function``) with the folder and its stop flag.
    """

    def __init__(self, num_processes: int, cwd: Path, target: str = TRAIN) -> None:
        self.num_processes, self._cwd, self._target = num_processes, cwd, target

    def attempt(self, folder: Path, stops: StopSignals) -> Ended:
        """Run the job in `folder` once."""
        with hosted_store() as store:
            number = self.num_processes
            place = Place(number, 0, number, 0, 1, "localhost", store.port, folder.name, {})
            group = workers(folder, place, self._cwd, self._target)
            with stops.running(group):
                group.wait()
        return conclude(folder, group.failed, outcomes.read_outcomes(folder))

    def finish(self, ended: Ended) -> None:
        """Do nothing: nobody waits."""


@contextmanager
def hosted_store() -> Iterator[TCPStore]:
    """Host a store for the workers of one attempt in the context, on a port that is free.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
    """
    from torch._C._distributed_c10d import TCPStore

    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def workers(folder: Path, place: Place, cwd: Path, target: str = TRAIN) -> WorkerGroup:
    """Return the workers of an attempt at the job in `folder`, to be started on this machine."""
    command = bootstrap.command(WORKER, json.dumps(order(folder, cwd, target)))
    return WorkerGroup(
        command,
        place,
        partial(has_outcome, folder),
        partial(outcomes.note_processes, folder),
    )


def order(folder: Path, cwd: Path, target: str = TRAIN) -> dict[str, Any]:
    """Return what each worker of an attempt is given; see `runner.launch.worker.main`."""
    return {
        "folder": str(folder),
        "target": target,
        "parent": os.getpid(),
        "path": [str(Path(__file__).resolve().parents[2]), str(cwd)],
    }


def has_outcome(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank has recorded how it ended."""
    return any(outcome.rank == rank for outcome in outcomes.read_outcomes(folder))


def conclude(folder: Path, failed: Mapping[int, Failure], left: Sequence[Outcome]) -> Ended:
    """Return how an attempt ended.

    Args:
        folder: the session.
        failed: how the processes of ranks ended that failed.
        left: the outcomes that processes have left.
    """
    # A process that left no word died in native code or was killed.
    silent = failed.keys() - {outcome.rank for outcome in left}
    hang, run_dir = outcomes.read_hang(folder), run_dir_of(folder)
    ended = hang is not None and not hang.is_consequence  # by the watchdog, on every rank
    causes = [_outcome_from_status(run_dir, rank, failed[rank], ended) for rank in sorted(silent)]
    causes += [outcome for outcome in left if outcome.code not in CLEAN]
    if hang is not None and causes:
        causes.append(hang)
    if not causes:
        return Ended(STOPPED if any(outcome.code == STOPPED for outcome in left) else DONE)
    # The end of one rank causes errors of communication on the others, perhaps recorded earlier.
    cause = min(causes, key=lambda outcome: (outcome.is_consequence, outcome.time))
    return Ended(cause.code, cause)


def stopped_while_waiting(run_dir: Path, number: int) -> Ended:
    """Return how a run ends that a stop signal meets while it waits for its machines."""
    if directory.newest_checkpoint(run_dir) is not None:  # it waits again, after a failure
        return Ended(STOPPED)
    name = signal.Signals(number).name
    print(f"{name} came before training began: nothing is saved.", file=sys.stderr, flush=True)
    return Ended(OF_SIGNAL + number)


def report(ended: Ended, run_dir: Path, num_processes: int) -> None:
    """Print on standard error how an attempt ended, if it failed or was interrupted."""
    if ended.code == INTERRUPTED:
        failures.print_interrupted(run_dir)
    elif ended.cause is not None:
        failures.print_failure(ended.cause, run_dir, num_processes)


def _outcome_from_status(run_dir: Path, rank: int, failure: Failure, ended: bool) -> Outcome:
    """Describe the end of a process; `ended`: the watchdog has ended the run."""
    status = failure.status
    if status == INTERRUPTED:  # SIGINT was sent only to this process
        return Outcome(rank, failure.time, INTERRUPTED, "it was interrupted")
    log = rank_logs.log_file(run_dir, rank)
    printed = rank_logs.tail(log)
    message = f"its process {outcomes.describe_exit(status)}"
    if status == FAILED and any(line.startswith(rank_logs.TIMED_OUT) for line in printed):
        message = "it hangs: native code keeps the interpreter"
    if status == DONE:
        message += " before the run was complete"
    return Outcome(
        rank=rank,
        time=failure.time,
        code=FAILED,
        message=message,
        traceback="\n".join([f"The end of {log}:", *printed]) if printed else "",
        # Native code of a process group aborts where another rank has ended.
        is_consequence=status == -signal.SIGABRT or (ended and status == FAILED),
    )
