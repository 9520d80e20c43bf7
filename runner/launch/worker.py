"""One process of a run: it knows its place, reads the frozen job, trains and writes its outcome.

Free of torch at import: where torch is not loaded yet, the number of threads is set before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from accel.machine.env import Environment
from accel.machine.imports import load_attribute
from runner.exit_codes import DONE, INTERRUPTED, STOPPED
from runner.launch import failures, rank_logs
from runner.recipe.keys import of_the_recipe
from runner.recipe.schema import Recipe
from runner.runs import directory, lock, sessions
from runner.runs.job import Job
from runner.runs.json_files import TIME_IS_UP
from runner.runs.numerics import read as read_numerics
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training import run_log
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS, StopFlag

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.datasets import Data


TRAIN = "runner.launch.worker:run"


@dataclass(frozen=True)
class Place:
    """The workers of one node among those of an attempt.

    Args:
        num_local: number of workers of this node.
        world_size: number of workers of all nodes.
        port: TCP port of the store that the launcher hosts, a new one for each attempt: what an
            attempt that failed has written there is not found by the next.
        address: host of the store, as this node reaches it.
        first_rank: rank of the first worker.
        node: index of this node.
        num_nodes: number of nodes.
        variables: further variables of the workers; None removes one.
    """

    num_local: int
    world_size: int
    port: int
    address: str = "localhost"
    first_rank: int = 0
    node: int = 0
    num_nodes: int = 1
    variables: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.num_local)

    def of_rank(self, rank: int, attempt: str) -> dict[str, str | None]:
        """Return torchrun's variables of one worker, and those of its node.

        Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        own: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank - self.first_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.num_local,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": attempt,
            "TORCHELASTIC_RESTART_COUNT": 0,  # of this store
        }
        return {**self.variables, **{name: str(value) for name, value in own.items()}}


def serve(folder: Path, target: str) -> NoReturn:
    """Be one of several workers, and exit.

    Args:
        folder: the session with the frozen job.
        target: "module:function", called with the folder and the worker's stop flag.
    """
    rank = Environment.read().rank or 0
    run_dir = run_dir_of(folder)
    rank_logs.leave_terminal_to_rank_zero(run_dir, rank)
    faulthandler.enable()
    stop = StopFlag(folder)
    try:
        # The output of the others is in logs of their own.
        logged = run_log.captured(run_dir, "of rank 0") if rank == 0 else contextlib.nullcontext()
        with logged, stop.installed():
            code = _attempt(target, folder, rank, stop)
            if code != DONE:
                end_process(code)  # before the handlers change: Ctrl-C may come at any time
    except KeyboardInterrupt:  # the parent says: end now
        code = INTERRUPTED
    end_unstopped(code)


def _attempt(target: str, folder: Path, rank: int, stop: StopFlag) -> int:
    # The fork server, or an actor of Ray's, held them back while it started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_SIGNALS)
    try:
        code = load_attribute(target)(folder, stop)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: the run is not complete
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends anyway
        # Written before anything is torn down: other ranks fail as soon as this one ends.
        outcome = failures.outcome_of(error, rank, run_dir_of(folder))
        if not outcome.write(folder) or rank > 0:  # else the parent prints it
            print(outcome.traceback or outcome.message, file=sys.stderr)
        return outcome.code
    # Without it the parent takes an exit with 0 for the end of a rank that was not complete.
    Outcome(rank, time.time(), code, stop.reason).write(folder)
    # The group takes any other status for a failure and would end the other ranks.
    return DONE if code == STOPPED else code


def end_unstopped(code: int) -> NoReturn:
    """End this process, in which nothing is left to stop."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process.

    After a failure nothing is destroyed on the way out: process groups whose peers have ended would
    wait for them, or abort and cover the cause.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the code of the run may have closed it
            stream.flush()
    if code == DONE:
        sys.exit(DONE)
    os._exit(code)


def run(folder: Path, stop: StopFlag | None = None) -> int:
    """Train a frozen job, as one of its processes.

    The folder is that of the job's session. Without `stop`, this process listens to the stop
    signals itself.

    Returns:
        0 where the run has come to its end, 75 where a signal or `trainer.max_time` stopped it.
    """
    numerics = read_numerics(folder)
    with lock.shared(run_dir_of(folder)), numerics.exported():  # for libraries loaded from here on
        job, recipe = Job.load(folder)
        numerics.apply()
        with run_log.log_levels_applied(job.log_levels):
            if stop is not None:
                return _train(job, recipe, stop)
            with StopFlag().installed() as own:
                return _train(job, recipe, own)


def _train(job: Job, recipe: Recipe, stop: StopFlag) -> int:
    from accel.checkpoint import disk_full
    from accel.comm.rng import set_seed
    from runner.launch import hangs
    from runner.recipe import processes
    from runner.recipe.batch_plan import plan_batches
    from runner.training import build, pruning
    from runner.training.loop import Loop

    here = Environment.read()
    dp_size = processes.dp_size(recipe, here.world_size)
    plan = plan_batches(recipe.trainer, dp_size, None)
    with (
        disk_full.told("the run", job.run_dir),
        of_the_recipe(),
        hangs.watching(recipe, job.place, stop, here.rank or 0, here.world_size),
        build.running(recipe, job.run_dir, plan) as accelerator,
    ):
        # The same on all ranks: each builds the same weights.
        set_seed(recipe.seed, deterministic=recipe.deterministic)
        data = build.build_data(recipe)
        recipe, known = build.with_facts(recipe, data)
        if accelerator.is_main_process:
            job.record_facts(known)
        callbacks = {**build.build_callbacks(recipe), **pruning.callbacks_of(job.run_dir)}
        step = build.build_step(recipe, accelerator.strategy.init_context())
        loop = Loop(
            recipe,
            job.run_dir,
            accelerator,
            step,
            data,
            callbacks,
            resume_from=job.resume_from,
            stop_flag=stop,
            on_begin=lambda: _commit(job, accelerator, data),
        )
        summary = loop.run()
        code = STOPPED if summary["stopped"] in ("signal", TIME_IS_UP) else DONE
        if accelerator.is_main_process:
            sessions.end(job.place, code, summary=summary)
    return code


def _commit(job: Job, accelerator: Accelerator, data: Data) -> None:
    """Make the job that the first step was made with the run's own; all ranks call it."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sessions.begin(job.place)
        directory.keep_artifacts(job.run_dir, data.artifacts)
