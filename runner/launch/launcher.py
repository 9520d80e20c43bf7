"""From a frozen job to processes: this one, fresh workers, or those that torchrun has started.

Every process reads the same frozen recipe from the run directory; none of them sees overrides. Exit
codes are those of `runner.exit_codes`. Free of torch at import.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config import processes, ray_placement
from runner.config.processes import Adopted
from runner.config.schema import Recipe
from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import bootstrap, failures, rank_logs
from runner.reporting import run_log
from runner.run_dir import abandoned, numerics, outcomes
from runner.run_dir.atomic_update import run_dir_of
from runner.run_dir.outcomes import Outcome

if TYPE_CHECKING:
    from runner.launch.worker_group import Failure
    from runner.run_dir.job import Job

TRAIN = "runner.launch.worker:run"
WORKER = "runner.launch.worker"  # its `main` is each process
# Runs the workers of an order: how many, and whether a rank that has exited was finished.
Group = Callable[[Mapping[str, object], int, Callable[[int], bool]], "dict[int, Failure]"]


def launch(job: Job, recipe: Recipe, *, fresh: bool = False) -> int:
    """Run a job, print the cause of a failure, and return the exit code of the command.

    The job is saved or staged already. Where `fresh`, a run of one process gets a process of its
    own, too (a sweep: no state of one job reaches the next). Else it runs in this process, where a
    debugger can reach it.

    Raises:
        ConfigError: if the number of processes contradicts the machine or the launcher.
    """
    number = processes.count(recipe.distributed)
    place = processes.adopted()
    local = place.local_world_size if place else number
    numerics.record_threads(job.run_dir, recipe, local, job.place)
    with run_log.captured(job.run_dir, f"of {number}: {shlex.join(sys.orig_argv)}"):
        if place is not None:
            from runner.launch import torchrun

            torchrun.publish(job.place)
            return run_adopted(job.place, place)
        if recipe.distributed.kind == ray_placement.KIND:
            from runner.launch.ray_group import RayGroup

            group = RayGroup(recipe.distributed)
            return run_group(job.place, number, Path(job.cwd), group=group)
        if number == 1 and not fresh:
            return run_here(job.place)
        return run_group(job.place, number, Path(job.cwd))


def follow(place: Adopted) -> int:
    """Join the run that rank 0 composes, as another rank that a launcher has started."""
    from runner.launch import torchrun

    folder = torchrun.receive()
    if folder is None:
        return DONE
    try:
        rank_logs.leave_terminal_to_rank_zero(run_dir_of(folder), place.rank)
    except FileNotFoundError:  # rank 0 was refused, has reported why and removed it
        return FAILED
    return run_adopted(folder, place)


def release_followers() -> None:
    """Notify the other ranks of a launcher, if there are any, that nothing is left to do."""
    if processes.adopted() is not None:
        from runner.launch import torchrun

        torchrun.publish(None)


def run_adopted(folder: Path, place: Adopted) -> int:
    """Run a job in this process, one of several that a launcher has started."""
    from runner.launch import worker

    code = run_here(folder, place.rank)
    if code not in CLEAN:
        is_new = folder == run_dir_of(folder)  # a resumed run keeps its files, whatever comes
        if place.rank == 0 and is_new:
            abandoned.remove(run_dir_of(folder), code)
        worker.end_process(code)
    return code


def run_here(folder: Path, rank: int = 0) -> int:
    """Run a job in this process, print the cause of a failure, and return the exit code.

    The folder with the frozen job is the run directory, or an attempt in it.
    """
    from runner.launch import worker

    if not faulthandler.is_enabled():
        faulthandler.enable()
    run_dir = run_dir_of(folder)
    try:
        return worker.run(folder)
    except KeyboardInterrupt:
        if rank == 0:
            failures.print_interrupted(run_dir)
        return INTERRUPTED
    except BaseException as error:  # also SystemExit: the run is not complete
        outcome = failures.outcome_of(error, rank)
        outcome.write(run_dir, _new_launch())
        failures.print_failure(outcome, run_dir)
        return outcome.code


def run_group(
    folder: Path, num_processes: int, cwd: Path, target: str = TRAIN, group: Group | None = None
) -> int:
    """Run a job in fresh processes, print the cause of a failure, and return the exit code.

    The folder is as for `run_here`; each worker calls `target` (``module:function``) with it and
    its stop flag. Code in `cwd`, the user's directory, can be imported. The processes run on this
    machine, unless `group` runs them elsewhere.
    """
    launch_id, run_dir = _new_launch(), run_dir_of(folder)
    order = {
        "run_dir": str(run_dir),
        "job": str(folder),
        "launch": launch_id,
        "target": target,
        "parent": os.getpid(),
        "path": [str(Path(__file__).resolve().parents[2]), str(cwd)],
    }
    run = group or _on_this_machine
    try:
        failed = run(order, num_processes, lambda rank: _has_outcome(run_dir, launch_id, rank))
    except KeyboardInterrupt:
        failures.print_interrupted(run_dir)
        return INTERRUPTED
    return _conclude(run_dir, launch_id, failed, num_processes)


def _on_this_machine(
    order: Mapping[str, object], num_processes: int, finished: Callable[[int], bool]
) -> dict[int, Failure]:
    from runner.launch import worker_group

    command = bootstrap.command(WORKER, json.dumps(order))
    return worker_group.run_group(command, num_processes, finished)


def _has_outcome(run_dir: Path, launch_id: str, rank: int) -> bool:
    return any(outcome.rank == rank for outcome in outcomes.read_outcomes(run_dir, launch_id))


def _conclude(
    run_dir: Path, launch_id: str, failed: Mapping[int, Failure], num_processes: int
) -> int:
    left = outcomes.read_outcomes(run_dir, launch_id)
    # A process that left no word died in native code or was killed.
    silent = failed.keys() - {outcome.rank for outcome in left}
    hang = outcomes.read_hang(run_dir, launch_id)
    ended = hang is not None and not hang.is_consequence  # by the watchdog, on every rank
    causes = [_outcome_from_status(run_dir, rank, failed[rank], ended) for rank in sorted(silent)]
    causes += [outcome for outcome in left if outcome.code not in CLEAN]
    for outcome in left:
        if outcome.code == DONE:
            outcome.remove(run_dir, launch_id)
    if hang is not None and causes:
        causes.append(hang)
    if not causes:
        return STOPPED if any(outcome.code == STOPPED for outcome in left) else DONE
    # The end of one rank causes errors of communication on the others, perhaps recorded earlier.
    cause = min(causes, key=lambda outcome: (outcome.is_consequence, outcome.time))
    if cause.code == INTERRUPTED:
        failures.print_interrupted(run_dir)
    else:
        failures.print_failure(cause, run_dir, num_processes)
    return cause.code


def _outcome_from_status(run_dir: Path, rank: int, failure: Failure, ended: bool) -> Outcome:
    """Describe the end of a process; `ended`: the watchdog has ended the run."""
    status = failure.status
    if status == INTERRUPTED:  # SIGINT was sent only to this process
        return Outcome(rank, failure.time, INTERRUPTED, "it was interrupted")
    how = outcomes.describe_exit(status)
    if status == DONE:
        how += " before the run was complete"
    log = rank_logs.log_file(run_dir, rank)
    printed = rank_logs.tail(log)
    return Outcome(
        rank=rank,
        time=failure.time,
        code=FAILED,
        message=f"its process {how}",
        traceback="\n".join([f"The end of {log}:", *printed]) if printed else "",
        # Native code of a process group aborts where another rank has ended.
        is_consequence=status == -signal.SIGABRT or (ended and status == FAILED),
    )


def _new_launch() -> str:
    return f"launch_{uuid.uuid4().hex[:8]}"
