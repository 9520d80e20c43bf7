"""From a frozen job to processes: this one, fresh workers, or those that torchrun has started.

Every process reads the same frozen recipe from the run directory; none of them sees overrides. Exit
codes are those of `runner.exit_codes`. Free of torch at import.
"""

from __future__ import annotations

import faulthandler
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine import passwords
from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, OF_SIGNAL
from runner.launch import attempt, attempts, failures, rank_logs, rendezvous
from runner.launch.first_node import FirstNode
from runner.launch.worker_group import StopSignals, Terminated
from runner.recipe import nodes, processes
from runner.recipe.processes import Adopted
from runner.recipe.schema import Recipe
from runner.runs import directory, numerics, sessions
from runner.runs.sessions import run_dir_of
from runner.training import run_log
from runner.training.stopping import StopFlag

if TYPE_CHECKING:
    from runner.runs.job import Job


def launch(job: Job, recipe: Recipe, *, fresh: bool = False) -> int:
    """Run a job, print the cause of a failure, and return the exit code of the command.

    The job is saved or staged already. Where `fresh`, a run of one process gets a process of its
    own, too (a sweep: no state of one job reaches the next). Else it runs in this process, where a
    debugger can reach it.

    Raises:
        ConfigError: if the number of processes contradicts the machine or the launcher.
    """
    number, local = processes.count(recipe.distributed), processes.local_count(recipe.distributed)
    place = processes.adopted()
    of_nodes = rendezvous.spans_nodes(recipe.distributed)
    in_ray = recipe.distributed.kind == nodes.RAY
    apart = number > 1 or fresh or of_nodes or in_ray or recipe.distributed.max_restarts
    if place is None and apart:
        return _launch_workers(job, recipe, number, local)
    numerics.record_threads(job.place, recipe, local)
    command = shlex.join(passwords.shown(sys.orig_argv))
    with run_log.captured(job.run_dir, f"of {number}: {command}"):
        if place is None:
            return run_here(job.place)
        from runner.launch import torchrun

        torchrun.publish(job.place)
        if fresh:  # the process is the caller's to end: it records how the job has ended
            return run_here(job.place, place.rank)
        return run_adopted(job.place, place)


def _launch_workers(job: Job, recipe: Recipe, number: int, local: int) -> int:
    machines: attempt.Machines
    if rendezvous.spans_nodes(recipe.distributed):
        machines = FirstNode(rendezvous.listener(recipe.distributed), job, recipe)
    elif recipe.distributed.kind == nodes.RAY:
        from runner.launch.ray_group import RayCluster

        machines = RayCluster(recipe.distributed, number, Path(job.cwd))
    else:
        machines = attempt.ThisMachine(number, Path(job.cwd))
    try:
        return attempts.train(machines, job, recipe, local)
    except KeyboardInterrupt:
        failures.print_interrupted(job.run_dir)
        return INTERRUPTED


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

    # Until the process has ended: srun sends SIGTERM to the others as soon as one has failed, and
    # takes one that it kills for stopped.
    with StopFlag().installed() as stop:
        code = run_here(folder, place.rank, stop)
        if code not in CLEAN:
            if place.rank == 0:
                directory.remove_unstarted(run_dir_of(folder), code)
            worker.end_process(code)
    return code


def run_here(folder: Path, rank: int = 0, stop: StopFlag | None = None) -> int:
    """Run a job in this process, print the cause of a failure, and return the exit code.

    The folder is the session with the frozen job; for `stop` see `worker.run`.
    """
    from runner.launch import worker

    if not faulthandler.is_enabled():
        faulthandler.enable()
    run_dir = run_dir_of(folder)
    try:
        return worker.run(folder, stop)
    except KeyboardInterrupt:
        if rank == 0:
            sessions.end(folder, INTERRUPTED)
            failures.print_interrupted(run_dir)
        return INTERRUPTED
    except BaseException as error:  # also SystemExit: the run is not complete
        outcome = failures.outcome_of(error, rank)
        outcome.write(folder)
        if rank == 0:
            sessions.end(folder, outcome.code, cause=asdict(outcome))
        failures.print_failure(outcome, run_dir)
        return outcome.code


def run_group(
    folder: Path, num_processes: int, cwd: Path, target: str = attempt.TRAIN, *, save: bool = True
) -> attempt.Ended:
    """Run a job once in fresh processes, print the cause of a failure, and return how it ended.

    The folder is as for `run_here`; for the rest see `attempt.ThisMachine`. Workers that do not
    `save` when a stop signal comes are ended by it; the exit code is then 128 and its number.
    """
    run_dir, machine = run_dir_of(folder), attempt.ThisMachine(num_processes, cwd, target)
    stops = StopSignals(save=save)
    try:
        with stops.installed():
            ended = machine.attempt(folder, stops)
    except KeyboardInterrupt:
        ended = attempt.Ended(INTERRUPTED)
    except Terminated:
        ended = attempt.Ended(OF_SIGNAL + stops.received[0])
    attempt.report(ended, run_dir, num_processes)
    return ended
