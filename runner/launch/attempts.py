"""Attempts at a run: workers that failed are started again, within the budget of the run.

A failure restarts; a refused configuration, Ctrl-C and a requested stop do not. Free of torch.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from accel.machine import passwords
from accel.machine.errors import AccelError
from runner.exit_codes import FAILED, INTERRUPTED
from runner.launch import failures, staging
from runner.launch.attempt import Ended, Machines, report
from runner.launch.worker_group import StopSignals
from runner.runs import directory, numerics, sessions
from runner.runs.outcomes import Outcome
from runner.training import run_log

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe
    from runner.runs.job import Job


def train(machines: Machines, job: Job, recipe: Recipe, local_processes: int) -> int:
    """Run a job to its end, report how it ended, and return the exit code of the command.

    Args:
        machines: where the workers run.
        job: the job, saved or staged already.
        recipe: its recipe.
        local_processes: number of workers of each machine.

    Raises:
        ConfigError: if the files of another attempt cannot be written.
    """
    limit, current = recipe.distributed.max_restarts, job
    ended = Ended(FAILED)
    try:
        with StopSignals().installed() as stops:
            while True:
                numerics.record_threads(current.place, recipe, local_processes)
                ended = _attempt(machines, current, stops)
                _end(current, ended)
                if limit == 0 or not _restarts(ended, stops):
                    return ended.code
                left = limit - staging.restarts_used(job.run_dir)
                failed = f"session {current.place.name} failed"
                if left <= 0:
                    _tell(job, f"{failed}: {_used_up(job, limit)}")
                    return ended.code
                current = staging.again(current, recipe)
                _tell(
                    job,
                    f"{failed}; restart {limit - left + 1} of {limit} goes on from "
                    f"{staging.origin(current)}",
                )
    except AccelError as error:
        code = failures.exit_code(error)
        ended = Ended(code, Outcome(0, time.time(), code, str(error)))
        raise
    except KeyboardInterrupt:
        ended = Ended(INTERRUPTED)
        raise
    finally:
        machines.finish(ended)
        _end(current, ended)


def _attempt(machines: Machines, job: Job, stops: StopSignals) -> Ended:
    heading = f"of {machines.num_processes}: {shlex.join(passwords.shown(sys.orig_argv))}"
    with run_log.captured(job.run_dir, heading):
        try:
            ended = machines.attempt(job.place, stops)
        except KeyboardInterrupt:
            ended = Ended(INTERRUPTED)
        report(ended, job.run_dir, machines.num_processes)
    return ended


def _end(job: Job, ended: Ended) -> None:
    cause = {} if ended.cause is None else {"cause": asdict(ended.cause)}
    sessions.end(job.place, ended.code, **cause)


def _restarts(ended: Ended, stops: StopSignals) -> bool:
    """Return whether an attempt ended with a failure that another one may not have."""
    return ended.code == FAILED and ended.cause is not None and not stops.received


def _used_up(job: Job, limit: int) -> str:
    told = f"distributed.max_restarts={limit} are used up over the whole run"
    if directory.newest_checkpoint(job.run_dir) is not None:
        return f"{told}; a greater number with resume= gives it more"
    return f"{told}, and there is no complete checkpoint to go on from: start a new one"


def _tell(job: Job, line: str) -> None:
    with run_log.captured(job.run_dir, "of the launcher"):
        print(line, file=sys.stderr, flush=True)
