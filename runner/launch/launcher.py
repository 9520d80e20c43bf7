"""From a frozen job to processes: this one, workers, or those that torchrun has started.

Every process reads the same frozen recipe from the run directory; none of them sees overrides.
Workers that failed are started again, within the budget of the run; a refused configuration, Ctrl-C
and a requested stop are final. Exit codes are those of `runner.exit_codes`. Free of torch at
import.
"""

from __future__ import annotations

import faulthandler
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from accel.machine import passwords
from accel.machine.errors import AccelError, ConfigError
from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, OF_SIGNAL
from runner.launch import failures, nodes, rank_logs, worker
from runner.launch.failures import Ended
from runner.launch.fork_server import ForkServer, server_of
from runner.launch.group import Group, Stops, stops_heard
from runner.launch.worker import TRAIN, Place
from runner.recipe import processes
from runner.recipe.machines import RAY
from runner.recipe.processes import Adopted
from runner.recipe.schema import Recipe
from runner.runs import directory, environment, numerics, outcomes, provenance, sessions
from runner.runs.job import Job
from runner.runs.json_files import writable, write_json
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training import run_log
from runner.training.stopping import StopFlag


class Machines(Protocol):
    """Where the workers of a run are started; `num_processes` are those of the last attempt."""

    num_processes: int

    def attempt(self, folder: Path, stops: Stops) -> Ended:
        """Run the job of a session once, and return how it ended.

        Raises:
            KeyboardInterrupt: on Ctrl-C, when no process is left.
        """

    def finish(self, ended: Ended) -> None:
        """Release what waits for another attempt: there is none."""


class ThisMachine:
    """All workers run on this machine; arguments are those of `ForkServer.makers`.

    Workers that do not `save` when a stop signal comes are ended by it; the exit code is then 128
    and its number. The `server` forks them; None: each attempt has one of its own.
    """

    def __init__(
        self,
        num_processes: int,
        cwd: Path,
        target: str = TRAIN,
        *,
        save: bool = True,
        server: ForkServer | None = None,
    ) -> None:
        self.num_processes, self._cwd, self._target = num_processes, cwd, target
        self._save, self._server = save, server

    def attempt(self, folder: Path, stops: Stops) -> Ended:
        """Run the job of a session once."""
        from runner.launch import store

        hosted = store.hosted()
        place = Place(self.num_processes, self.num_processes, hosted.port)
        is_left = partial(outcomes.is_left, folder)
        with nullcontext(self._server) if self._server else server_of(folder) as server:
            workers = server.makers(folder, place, self._cwd, self._target)
            failed = Group(stops, save=self._save).run(workers, is_left)
        if stops.received and not self._save:
            return Ended(OF_SIGNAL + stops.received[0])
        return failures.conclude(failures.outcomes_of(folder, failed))

    def finish(self, ended: Ended) -> None:
        """Do nothing: nobody waits."""


def launch(
    job: Job, recipe: Recipe, *, fresh: bool = False, server: ForkServer | None = None
) -> int:
    """Run a job that is staged, print the cause of a failure, and return the exit code.

    Where `fresh`, a run of one process gets a process of its own, too (a sweep: no state of one job
    reaches the next). Else it runs in this process, where a debugger can reach it. The `server`, if
    there is one, forks the workers of this machine.

    Raises:
        ConfigError: if the number of processes contradicts the machine or the launcher.
    """
    number, local = processes.count(recipe.distributed), processes.local_count(recipe.distributed)
    place = processes.adopted()
    of_nodes = nodes.is_one_of_several(recipe.distributed)
    in_ray = recipe.distributed.kind == RAY
    apart = number > 1 or fresh or of_nodes or in_ray or recipe.distributed.max_restarts
    if place is None and apart:
        return train(_machines(job, recipe, number, server), job, recipe, local)
    numerics.record_threads(job.place, recipe, local)
    with run_log.captured(job.run_dir, _heading(number)):
        if place is None:
            return run_here(job.place)
        from runner.launch import store

        store.publish(job.place)
        if fresh:  # the process is the caller's to end: it records how the job has ended
            return run_here(job.place, place.rank)
        return run_adopted(job.place, place)


def _machines(job: Job, recipe: Recipe, number: int, server: ForkServer | None) -> Machines:
    if nodes.is_one_of_several(recipe.distributed):
        return nodes.FirstNode(job, recipe)
    if recipe.distributed.kind == RAY:
        from runner.launch.ray import RayCluster

        return RayCluster(recipe.distributed, number)
    return ThisMachine(number, Path(job.cwd), server=server)


@contextmanager
def warming(recipe: Recipe) -> Iterator[ForkServer | None]:
    """Have a server in the context that forks the workers of a run; None: it has none here.

    It loads what they need while this process checks the recipe.
    """
    number = local = 1
    with suppress(ConfigError):  # the check of the recipe raises it, with all else that is wrong
        local = processes.local_count(recipe.distributed)
        number = processes.count(recipe.distributed)
    elsewhere = nodes.is_one_of_several(recipe.distributed) or recipe.distributed.kind == RAY
    if number == 1 or elsewhere or processes.adopted() is not None:
        yield None
        return
    run_dir = None if recipe.resume is None else Path(recipe.resume)
    with closing(ForkServer(numerics.of(recipe, local, run_dir))) as server:
        yield server


def _heading(number: int) -> str:
    return f"of {number}: {shlex.join(passwords.shown(sys.orig_argv))}"


# -- in workers, with restarts -------------------------------------------------------------


def train(machines: Machines, job: Job, recipe: Recipe, local_processes: int) -> int:
    """Run a job in workers to its end, report how it ended, and return the exit code.

    Args:
        machines: where the workers run.
        job: the job, staged already.
        recipe: its recipe.
        local_processes: number of workers of each machine.

    Raises:
        ConfigError: if the files of another attempt cannot be written.
    """
    limit, ended = recipe.distributed.max_restarts, Ended(FAILED)
    try:
        with stops_heard() as stops:
            while True:
                numerics.record_threads(job.place, recipe, local_processes)
                ended = _attempt(machines, job, stops)
                again = ended.code == FAILED and ended.cause is not None and not stops.received
                if not limit or not again:
                    return ended.code
                left = limit - restarts_used(job.run_dir)
                failed = f"session {job.place.name} failed"
                if left <= 0:
                    _tell(job, f"{failed}: {_used_up(job, limit)}")
                    return ended.code
                job = _again(job, recipe)
                number = f"restart {limit - left + 1} of {limit}"
                _tell(job, f"{failed}; {number} goes on from {_origin(job)}")
    except AccelError as error:
        code = failures.exit_code(error)
        ended = Ended(code, Outcome(0, time.time(), code, str(error)))
        raise
    except KeyboardInterrupt:
        ended = Ended(INTERRUPTED)
        failures.print_interrupted(job.run_dir)
        return INTERRUPTED
    finally:
        machines.finish(ended)
        _end(job, ended)


def _attempt(machines: Machines, job: Job, stops: Stops) -> Ended:
    with run_log.captured(job.run_dir, _heading(machines.num_processes)):
        try:
            ended = machines.attempt(job.place, stops)
        except KeyboardInterrupt:
            ended = Ended(INTERRUPTED)
        failures.report_end(ended, job.run_dir, machines.num_processes)
    _end(job, ended)
    return ended


def _end(job: Job, ended: Ended) -> None:
    cause = {} if ended.cause is None else {"cause": asdict(ended.cause)}
    sessions.end(job.place, ended.code, **cause)


def _used_up(job: Job, limit: int) -> str:
    told = f"distributed.max_restarts={limit} are used up over the whole run"
    if directory.newest_checkpoint(job.run_dir) is not None:
        return f"{told}; a greater number with resume= gives it more"
    return f"{told}, and there is no complete checkpoint to go on from: start a new one"


def _tell(job: Job, line: str) -> None:
    with run_log.captured(job.run_dir, "of the launcher"):
        print(line, file=sys.stderr, flush=True)


def run_group(folder: Path, num_processes: int, cwd: Path, target: str) -> Ended:
    """Let workers do what a request asks for, print a failure, and return how they ended.

    A stop signal ends them: they have nothing to save.
    """
    try:
        with stops_heard() as stops:
            machine = ThisMachine(num_processes, cwd, target, save=False)
            ended = machine.attempt(folder, stops)
    except KeyboardInterrupt:
        ended = Ended(INTERRUPTED)
    failures.report_end(ended, run_dir_of(folder), num_processes)
    return ended


# -- the session that a command, or a restart, adds to a run ---------------------------------


def staged(requested: Job, recipe: Recipe) -> Job:
    """Write the job, its recipe and the environment to a new session of the run.

    Raises:
        ConfigError: if they cannot be written.
    """
    remedy = "Make room or give it a folder you may write to; nothing of it has changed."
    with writable(str(requested.run_dir), remedy):
        written = requested.save(recipe)
        found = environment.describe(recipe.data, written.place / provenance.DIFF)
        write_json(written.place / environment.FILE, found)
    return written


def _again(failed: Job, recipe: Recipe) -> Job:
    """Return the job that goes on with a run after `failed`: from its newest complete checkpoint.

    Without one the run begins anew. Requires the run's lock.
    """
    checkpoint = directory.newest_checkpoint(failed.run_dir)
    if checkpoint is None:
        directory.set_aside(failed.run_dir)
    origin = None if checkpoint is None else str(checkpoint)
    return staged(replace(failed, resume_from=origin, restart=True), recipe)


def restarts_used(run_dir: Path) -> int:
    """Return how many restarts a run has had, over all commands that have trained it."""
    return sum(Job.read(folder)[0].restart for folder in sessions.of_run(run_dir))


def _origin(job: Job) -> str:
    """Describe where a job begins."""
    if job.resume_from is None:
        return "the beginning (there is no complete checkpoint)"
    return os.path.relpath(job.resume_from, job.run_dir)


# -- in this process -----------------------------------------------------------------------


def follow(place: Adopted) -> int:
    """Join the run that rank 0 composes, as another rank that a launcher has started."""
    from runner.launch import store

    folder = store.receive()
    if folder is None:
        return DONE
    try:
        rank_logs.leave_terminal_to_rank_zero(run_dir_of(folder), place.rank)
    except FileNotFoundError:  # rank 0 was refused, has reported why and removed it
        return FAILED
    return run_adopted(folder, place)


def release_followers() -> None:
    """Tell the other ranks of a launcher, or the other nodes, that nothing is left to do."""
    nodes.release_members()
    if processes.adopted() is not None:
        from runner.launch import store

        store.publish(None)


def run_adopted(folder: Path, place: Adopted) -> int:
    """Run a job in this process, one of several that a launcher has started."""
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
        outcome = failures.outcome_of(error, rank, run_dir)
        outcome.write(folder)
        if rank == 0:
            sessions.end(folder, outcome.code, cause=asdict(outcome))
        failures.print_failure(outcome, run_dir)
        return outcome.code
