"""A job of a sweep, wherever it runs: the task that Hydra's launchers call, and one try at a run.

A launcher may call the task in another process, or on another machine, which knows nothing of the
command that began the sweep. So the task is a plain value: it finds the job's recipe in the sweep
directory (or composes and checks it, where a sweeper has chosen the values) and trains. A job's
state is that of its run, whose lock decides who trains it. Free of torch until a job starts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine import parent_watch
from accel.machine.errors import Problem
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, start_run
from runner.launch.group import MONITOR_SECONDS, Stops, stops_heard
from runner.recipe import composition, hydra_setup, trust
from runner.runs import lock, resumable
from runner.runs.record import RunRecord
from runner.sweep import pool
from runner.sweep import sweep as sweeps
from runner.sweep.devices import Machine
from runner.sweep.plan import Jobs
from runner.sweep.sweep import job_dir
from runner.training.stopping import HEARD_SIGNALS

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from runner.launch.fork_server import ForkServer
    from runner.recipe.schema import Recipe
    from runner.sweep.live import Live


class JobFailed(Exception):
    """Raised to a sweeper that chooses its samples; the error has been printed."""


class JobStopped(JobFailed):
    """A job was stopped with its state saved, or was not begun, since the sweep is to end."""


@dataclass(frozen=True)
class Local:
    """What jobs that the command itself starts need of it.

    The server is that of this machine; None: they run in a cluster.
    """

    server: ForkServer | None
    live: Live
    jobs: Jobs


@dataclass(frozen=True)
class Task:
    """The task that Hydra calls with each job; without `local` it can be pickled.

    Args:
        folder: the sweep directory.
        config_name: the primary file.
        parent: process id of the command.
        host: its machine.
        is_detached: jobs outlive the command, as on a cluster.
        command: the command line.
        numbers: numbers of the jobs to run, in the order that the launcher gets them; None: a
            sweeper chooses the jobs and their numbers, and gets their objectives.
        log_levels: levels of loggers by name, in each process of a job.
        local: for jobs that the command itself starts.
    """

    folder: str
    config_name: str
    parent: int
    host: str
    is_detached: bool = False
    command: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None
    log_levels: tuple[tuple[str, str], ...] = ()
    local: Local | None = field(default=None, compare=False)

    @property
    def sweep(self) -> sweeps.Sweep:
        """The sweep."""
        return _read(self.folder)

    def number(self, index: int) -> int:
        """Return the number of the job that Hydra counts as `index`."""
        return index if self.numbers is None else self.numbers[index]

    def pending_overrides(self) -> list[list[str]]:
        """Return the overrides of the jobs to run, of those that are known."""
        return [self._known_overrides(number) for number in self.numbers or ()]

    def _known_overrides(self, number: int) -> list[str]:
        """Return overrides as they were typed, without those of Hydra's own node."""
        given = self.sweep.description.jobs[number].overrides
        return [one for one in given if not hydra_setup.key_of(one).startswith("hydra")]

    # -- started by the command itself -----------------------------------------------------

    def run_here(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run jobs in forks of the command's server; return their objectives."""
        assert self.local is not None
        assert self.local.server is not None
        machine = Machine.here(self.local.jobs)
        return self.run_with(self.local.server, machine, job_overrides, first)

    def run_with(
        self,
        server: pool.Server,
        machine: pool.Places,
        job_overrides: Sequence[Sequence[str]],
        first: int,
    ) -> list[JobReturn]:
        """Run jobs in processes of a server, as they fit; return their objectives."""
        assert self.local is not None
        given = (Path(self.folder), self.config_name, machine, self.local.live, self.command)
        workers = pool.Pool(server, *given, dict(self.log_levels))
        jobs, codes = [], {}
        for number, overrides in enumerate(job_overrides, first):
            number = self.number(number)
            try:
                recipe = self._recipe_later(number, overrides)
            except Exception as error:
                codes[number] = failures.report(error)
                continue
            jobs.append(pool.Job(number, tuple(overrides), recipe))
        codes |= workers.run(jobs)
        if workers.is_stopped:
            raise SystemExit(STOPPED)
        return self.returned(job_overrides, first, codes)

    def returned(
        self, job_overrides: Sequence[Sequence[str]], first: int, codes: Mapping[int, int]
    ) -> list[JobReturn]:
        """Return the objectives of jobs that have ended with exit codes, as Hydra wants them."""
        from hydra.core.utils import JobReturn, JobStatus

        returned = []
        for index, overrides in enumerate(job_overrides, first):
            number = self.number(index)
            answer = JobReturn(overrides=list(overrides))
            try:
                answer.return_value = self._answer(number, codes.get(number, FAILED))
                answer.status = JobStatus.COMPLETED
            except JobFailed as error:
                answer.return_value = error
                answer.status = JobStatus.FAILED
            returned.append(answer)
        return returned

    def _recipe_later(self, number: int, overrides: Sequence[str]) -> Callable[[], Recipe]:
        """Return a function that returns the recipe of a job; a sampled one is composed now."""
        if self.numbers is not None:
            return partial(self._recipe, number, overrides)
        found = self._recipe(number, overrides)
        return lambda: found

    # -- called by a launcher --------------------------------------------------------------

    def __call__(self, config: DictConfig) -> float | None:
        """Train the job that Hydra has composed, in a process of the launcher's.

        The config is not read: the recipe is the one that was composed and checked when the sweep
        began, else it is composed from the job's overrides, and checked, in the same way.

        Returns:
            The objective of the run.

        Raises:
            JobFailed: to a sweeper that chooses its own samples.
        """
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        number = self.number(int(job.job.num))
        overrides = list(map(str, job.overrides.task))
        code = self.train_as_child(number, overrides)
        sys.stdout.flush()  # the launcher may end the process at any time
        return self._answer(number, code)

    def train_as_child(self, number: int, overrides: Sequence[str]) -> int:
        """Train a job in processes below this one of a launcher's; return the exit code.

        This process ends with the command, and begins no further job once it was stopped.
        """
        global _is_stopped
        if _is_stopped:
            return STOPPED
        is_child = self.parent != os.getpid() and self.host == platform.node()
        if is_child and not self.is_detached:
            parent_watch.die_with_ancestor(self.parent)
        with stops_heard() as stops:
            code = self.train(number, overrides)
        _is_stopped = bool(stops.received) or code == INTERRUPTED
        return code

    def train(self, number: int, overrides: Sequence[str]) -> int:
        """Train a job as this process, or as its children; return the exit code."""
        sys.orig_argv[:] = self.command or sys.orig_argv
        if self.numbers is not None:
            overrides = self._known_overrides(number)
        print(f"job {number:04}: {' '.join(overrides)}", flush=True)
        try:
            recipe, levels = self._recipe(number, overrides), dict(self.log_levels)
        except Exception as error:
            return failures.report(error)
        given = (Path(self.folder), number, overrides, self.config_name, recipe, levels)
        return run(*given, fresh=True)

    def _recipe(self, number: int, overrides: Sequence[str]) -> Recipe:
        """Return the recipe of a job; raises what is wrong with one that a sweeper has chosen."""
        from runner.training import build

        if self.numbers is not None:
            return self.sweep.recipe(number)
        missing = trust.missing_packages()
        with hydra_setup.session(overrides):
            examined = composition.new_run(overrides, self.config_name, number)
        build.require([examined], missing)
        return examined.recipe

    def _answer(self, number: int, code: int) -> float | None:
        """Return a job's objective; raise to a sweeper that chooses its samples if there is none.

        The other one starts the next job, whatever becomes of this.
        """
        found = RunRecord(self.sweep.run_dir(number))
        value = None if found.objective is None else found.objective.value
        if self.numbers is not None:
            return value
        if code in (STOPPED, INTERRUPTED):
            raise JobStopped(f"job {number:04} was stopped")
        if code != DONE:
            how = found.failure.get("message") or f"it ended with exit code {code}"
            raise JobFailed(f"job {number:04}: {how}")
        # A search may have other objectives, and knows what none means.
        if value is None and not self.sweep.description.search:
            problem = Problem(
                str(found.path),
                "the sweeper chooses by a validation metric, and the run has measured none",
                "Give the data a validation split, or sweep over lists with the basic sweeper.",
            )
            print(problem, file=sys.stderr)
            raise JobFailed(str(problem))
        return value


# Whether a stop signal has reached this process of a launcher's.
_is_stopped = False


@functools.cache  # `sweep.json` never changes
def _read(folder: str) -> sweeps.Sweep:
    return sweeps.read(Path(folder))


# -- one try -------------------------------------------------------------------------------


def run(
    folder: Path,
    number: int,
    overrides: Sequence[str],
    config_name: str,
    recipe: Recipe,
    log_levels: Mapping[str, str],
    *,
    fresh: bool = False,
) -> int:
    """Train a job of the sweep in `folder` to its end, once no other command trains it.

    With `fresh` it gets processes of its own in any case. `log_levels` are those of loggers by
    name. An error is printed.

    Returns:
        The exit code of the job; 0 where it is done, perhaps before.
    """
    run_dir = job_dir(folder, number)
    try:
        # The server that has forked this process held them back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_SIGNALS)
        trust.import_packages()
        run_dir.mkdir(exist_ok=True)
        with lock.held(run_dir, math.inf):
            if RunRecord(run_dir).is_done:
                resumable.require_same(run_dir, recipe)
                return DONE
            examined = composition.Examined(
                recipe, [], tuple(overrides), config_name, log_levels=log_levels
            )
            code = start_run.continue_in(run_dir, examined, fresh=fresh)
            return DONE if RunRecord(run_dir).is_done else code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return STOPPED if end.code == STOPPED else FAILED  # not even 0: it is not complete
    except Exception as error:
        return failures.report(error)


# -- stopping jobs of another launcher -----------------------------------------------------


@contextlib.contextmanager
def stops_sent_on(folder: Path) -> Iterator[Stops]:
    """Send stop signals and Ctrl-C on to the jobs of the sweep that run below this process.

    They are found by the locks of their runs. The launcher is left once they have ended.
    """

    def forward(number: int) -> None:
        told: set[int] = set()
        deadline = time.monotonic() + (
            pool.INTERRUPT_SECONDS if number == signal.SIGINT else math.inf
        )
        while (left := _holders_below(folder)) and time.monotonic() < deadline:
            if os.getpid() in left:  # the launcher trains here: the job hears the signal itself
                return
            for pid in left - told:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            told |= left
            time.sleep(MONITOR_SECONDS)
        if number != signal.SIGINT:
            raise SystemExit(STOPPED)

    with stops_heard(forward) as stops:
        yield stops


def _holders_below(folder: Path) -> set[int]:
    """Return the processes below this one, and it itself, that train jobs of a sweep."""
    holders = [lock.holder(path) for path in folder.glob("[0-9]*")]
    here = {one.pid for one in holders if one is not None and one.host == platform.node()}
    return {pid for pid in here if os.getpid() in _ancestors(pid)}


def _ancestors(pid: int) -> Iterator[int]:
    """Yield a process and those above it. Source: proc_pid_stat(5)."""
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or this is not Linux
            return
