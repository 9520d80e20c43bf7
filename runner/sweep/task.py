"""The task that Hydra's launchers call with each job, wherever they put it.

A launcher may call it in another process, or on another machine, which knows nothing of the command
that began the sweep. So the task is a plain value: it finds the job's recipe in the sweep directory
(or composes and checks it, where a sweeper has chosen the values) and trains. Free of torch until a
job starts.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accel.machine import parent_watch
from accel.machine.errors import ConfigError, Problem
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures
from runner.launch.group import stops_heard
from runner.recipe import composition, hydra_setup, paths
from runner.runs.record import RunRecord
from runner.sweep import attempt, pool
from runner.sweep import sweep as sweeps
from runner.sweep.devices import Machine
from runner.sweep.plan import Jobs
from runner.training.stopping import STOP_SIGNALS, handlers_restored

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from runner.recipe.schema import Recipe
    from runner.sweep.fork_server import ForkServer
    from runner.sweep.live import Live

STOP_FILE = "stop"
CONTROL = ".command-"


class JobFailed(Exception):
    """Raised to a sweeper that chooses its samples; the error has been printed."""


class JobStopped(JobFailed):
    """A job was stopped with its state saved, or was not begun, since the sweep is to end."""


@dataclass(frozen=True)
class Local:
    """What jobs under the command's own process need of it; never pickled.

    The server is that of this machine; None: they run in a cluster.
    """

    server: ForkServer | None
    live: Live
    jobs: Jobs


@dataclass(frozen=True)
class Task:
    """The task that Hydra calls with each job; it can be pickled to another process.

    Args:
        folder: the sweep directory.
        control: folder of this command in it: process ids of its jobs, and whether it is stopped.
        config_name: the primary file.
        parent: process id of the command.
        host: its machine.
        is_detached: jobs outlive the command, as on a cluster.
        command: the command line.
        numbers: numbers of the jobs to run, in the order that the launcher gets them; None: a
            sweeper chooses the jobs and their numbers, and gets their objectives.
        log_levels: levels of loggers by name, in each process of a job.
        local: for jobs on this machine.
    """

    folder: str
    control: str
    config_name: str
    parent: int
    host: str
    is_detached: bool = False
    command: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None
    log_levels: tuple[tuple[str, str], ...] = ()
    local: Local | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "sweep"} | {
            "local": None
        }

    @cached_property
    def sweep(self) -> sweeps.Sweep:
        """The sweep."""
        return sweeps.read(Path(self.folder))

    # -- by the sweeper of known jobs ------------------------------------------------------

    def pending_overrides(self) -> list[list[str]]:
        """Return the overrides of the jobs to run."""
        jobs = self.sweep.description.jobs
        return [_of_recipe(jobs[number].overrides) for number in self.numbers or ()]

    # -- on this machine -------------------------------------------------------------------

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
        workers = pool.Pool(
            server,
            Path(self.folder),
            self.config_name,
            machine,
            self.local.live,
            self.command,
            dict(self.log_levels),
        )
        tasks, refused = [], {}
        for index, overrides in enumerate(job_overrides):
            number = self.number(first + index)
            try:
                recipe = self._recipe_later(number, overrides)
            except Exception as error:
                refused[number] = failures.report(error)
                continue
            tasks.append(pool.Task(number, tuple(overrides), recipe))
        codes = {**refused, **workers.run(tasks)}
        if workers.is_stopped:
            raise SystemExit(STOPPED)
        return self.returned(job_overrides, first, codes)

    def returned(
        self, job_overrides: Sequence[Sequence[str]], first: int, codes: Mapping[int, int]
    ) -> list[JobReturn]:
        """Return the objectives of jobs that have ended with exit codes, as Hydra wants them."""
        from hydra.core.utils import JobReturn, JobStatus

        returned = []
        for index, overrides in enumerate(job_overrides):
            number = self.number(first + index)
            answer = JobReturn(overrides=list(overrides))
            try:
                answer.return_value = self._answer(number, codes.get(number, FAILED))
                answer.status = JobStatus.COMPLETED
            except JobFailed as error:
                answer.return_value = error
                answer.status = JobStatus.FAILED
            returned.append(answer)
        return returned

    @property
    def is_stopped(self) -> bool:
        """Whether the command that began the jobs has asked them to stop."""
        return (Path(self.control) / STOP_FILE).exists()

    def number(self, index: int) -> int:
        """Return the number of the job that Hydra counts as `index`."""
        return index if self.numbers is None else self.numbers[index]

    def _recipe_later(self, number: int, overrides: Sequence[str]) -> Callable[[], Recipe]:
        """Return a function that returns the recipe of a job; a sampled one is composed now."""
        if self.numbers is not None:
            return partial(self._recipe, number, overrides)
        found = self._recipe(number, overrides)
        return lambda: found

    # -- anywhere --------------------------------------------------------------------------

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
        if self.numbers is not None:  # as they were typed
            jobs = sweeps.read(Path(self.folder)).description.jobs
            overrides = _of_recipe(jobs[number].overrides)
        if self.is_stopped:
            return self._answer(number, STOPPED)
        with self.in_launcher_process(number):
            code = self.attempt(number, overrides)
        sys.stdout.flush()  # the launcher may end the process at any time
        return self._answer(number, code)

    def attempt(self, number: int, overrides: Sequence[str]) -> int:
        """Train a job in this process, or in processes of its own; return its exit code."""
        print(f"job {number:04}: {' '.join(overrides)}", flush=True)
        return attempt.code_of(lambda: self._train(number, overrides))

    def _train(self, number: int, overrides: Sequence[str]) -> int:
        recipe = self._recipe(number, overrides)
        while True:
            code = attempt.run(
                Path(self.folder),
                number,
                overrides,
                self.config_name,
                recipe,
                fresh=True,
                log_levels=dict(self.log_levels),
            )
            if code != attempt.BUSY:
                return code
            time.sleep(pool.BUSY_SECONDS)  # another command trains it, and may be killed
            if self.is_stopped:
                return STOPPED

    def _recipe(self, number: int, overrides: Sequence[str]) -> Recipe:
        """Return the recipe of a job; raises what is wrong with one that a sweeper has chosen."""
        from runner.recipe import trust
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
        run = RunRecord(self.sweep.run_dir(number))
        value = None if run.objective is None else run.objective.value
        if self.numbers is not None:
            return value
        if code in (STOPPED, INTERRUPTED):
            raise JobStopped(f"job {number:04} was stopped")
        if code != DONE:
            how = run.failure.get("message") or f"it ended with exit code {code}"
            raise JobFailed(f"job {number:04}: {how}")
        # A search may have other objectives, and knows what none means.
        if value is None and not self.sweep.description.search:
            problem = Problem(
                str(run.path),
                "the sweeper chooses by a validation metric, and the run has measured none",
                "Give the data a validation split, or sweep over lists with the basic sweeper.",
            )
            print(problem, file=sys.stderr)
            raise JobFailed(str(problem))
        return value

    @contextlib.contextmanager
    def in_launcher_process(self, number: int) -> Iterator[None]:
        """Be a process of the launcher's: end with the parent, and stop when it says so."""
        is_child = self.parent != os.getpid() and self.host == platform.node()
        if is_child and not self.is_detached:
            parent_watch.die_with_ancestor(self.parent)
        with handlers_restored((*STOP_SIGNALS, signal.SIGINT)):
            for name in STOP_SIGNALS:
                signal.signal(name, _stop_here)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with self.noted(number):
                yield

    @contextlib.contextmanager
    def noted(self, number: int) -> Iterator[None]:
        """Let the command find this process in the context, to hand signals on to it."""
        sys.orig_argv[:] = self.command or sys.orig_argv
        note = Path(self.control, f"{number}.pid")
        with contextlib.ExitStack() as stack:
            stack.callback(note.unlink, missing_ok=True)
            with contextlib.suppress(OSError):  # the command has ended, and its folder with it
                note.write_text(f"{os.getpid()} {platform.node()}", encoding="utf-8")
            yield


def _stop_here(number: int, frame: FrameType | None) -> None:
    # While a job trains, signals go to its workers; this is before and after that.
    raise SystemExit(STOPPED)


def _of_recipe(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job's recipe, without those of Hydra's own node."""
    return [one for one in overrides if not hydra_setup.key_of(one).startswith("hydra")]


# -- stopping ------------------------------------------------------------------------------


@contextlib.contextmanager
def control_folder(sweep_dir: Path) -> Iterator[Path]:
    """Make the folder by which jobs find their command: their process ids, and a request to stop.

    Raises:
        ConfigError: if it cannot be made.
    """
    try:
        control = Path(tempfile.mkdtemp(prefix=CONTROL, dir=sweep_dir))
    except OSError as error:
        rule = f"the jobs of a sweep are run from there, and that failed ({paths.failure(error)})"
        remedy = "Make room, or the folder writable, and give the command again."
        raise ConfigError.of(str(sweep_dir), rule, remedy) from error
    try:
        yield control
    finally:
        # A launcher's process may be writing its last file there.
        shutil.rmtree(control, ignore_errors=True)


@contextlib.contextmanager
def stops_forwarded(control: Path) -> Iterator[None]:
    """Hand stop signals and Ctrl-C on to jobs in other processes, and let no further one begin."""

    def forward(number: int) -> None:
        (control / STOP_FILE).touch()
        for note in control.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                pid, host = note.read_text(encoding="utf-8").split()
                if host == platform.node():
                    os.kill(int(pid), number)
        deadline = time.monotonic() + pool.INTERRUPT_SECONDS
        while (
            number == signal.SIGINT and any(control.glob("*.pid")) and time.monotonic() < deadline
        ):
            time.sleep(0.05)

    with stops_heard(forward):
        yield
