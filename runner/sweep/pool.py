"""Jobs of a sweep at once: started as they fit, watched, stopped together.

A job that another command trains (its run directory is locked) is waited for, and taken over where
that command was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch.group import Group, Handle, Stops, stops_heard
from runner.recipe.schema import Recipe
from runner.runs import lock
from runner.runs.outcomes import describe_exit
from runner.sweep import attempt
from runner.sweep.devices import Share
from runner.sweep.fork_server import Order
from runner.sweep.live import Live
from runner.sweep.sweep import job_dir
from runner.training.stopping import STOP_SIGNALS

TARGET = "runner.sweep.attempt:run"
CONSOLE = "console.log"
POLL_SECONDS = 0.2
# Between looks at a job that another command trains.
BUSY_SECONDS = 0.5
# How long Ctrl-C waits for jobs to end by themselves.
INTERRUPT_SECONDS = 8.0


@dataclass(frozen=True)
class Task:
    """A job to be trained: its number, its overrides, and its recipe when it starts."""

    number: int
    overrides: tuple[str, ...]
    recipe: Callable[[], Recipe]


@dataclass
class _Job:
    task: Task
    recipe: Recipe
    share: Share
    is_shown: bool = False


class Server(Protocol):
    """Starts processes of jobs: a fork server on this machine, or a cluster."""

    def start(self, order: Order) -> Handle: ...

    def wait(self, seconds: float) -> None:
        """Wait so long, or until something has happened."""


class Places(Protocol):
    """Says which jobs fit now.

    `jobs` is 1 where they run one after the other; with a queue, they may start later than they are
    ordered.
    """

    @property
    def has_queue(self) -> bool: ...

    @property
    def jobs(self) -> int | str: ...

    def share_of(self, recipe: Recipe) -> Share | None: ...

    def give_back(self, share: Share) -> None: ...


class Pool:
    """Runs jobs in processes of a server, which it does not own."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        config_name: str,
        machine: Places,
        live: Live,
        command: Sequence[str] = (),
        log_levels: Mapping[str, str] | None = None,
    ) -> None:
        self._server, self._folder, self._config_name = server, folder, config_name
        self._machine, self._live, self._command = machine, live, command
        self._log_levels = log_levels
        self._queue: deque[Task] = deque()
        self._jobs: dict[int, _Job] = {}
        self._not_before: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._stops = Stops()
        self._group: Group = Group(self._stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal came: no further job starts, and those that run save and end."""
        return bool(self._stops.received)

    def run(self, tasks: Sequence[Task]) -> dict[int, int]:
        """Train jobs; return the exit code of each that was started, by number.

        Raises:
            KeyboardInterrupt: on Ctrl-C, when no job is left.
        """
        self._queue, self._codes = deque(tasks), {}
        with stops_heard() as self._stops:
            self._group = Group(self._stops)
            try:
                while self._jobs or (self._queue and not self.is_stopped):
                    self._start_what_fits()
                    self._server.wait(POLL_SECONDS)
                    self._take(self._group.poll())
                    self._live.update()
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._take(self._group.end(INTERRUPT_SECONDS))
                raise
        return dict(self._codes)

    # -- starting --------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        for _ in range(len(self._queue)):
            if self.is_stopped:
                return
            task = self._queue.popleft()
            if self._is_busy(task):
                self._queue.append(task)
                continue
            recipe = task.recipe()
            share = self._machine.share_of(recipe)
            if share is None:
                self._queue.appendleft(task)
                return
            self._start(_Job(task, recipe, share))

    def _is_busy(self, task: Task) -> bool:
        """Return whether another command trains a job; asked again only after a while."""
        if self._not_before.get(task.number, 0.0) > time.monotonic():
            return True
        holder = lock.holder(job_dir(self._folder, task.number))
        if holder is not None:
            self._wait_for(task, str(holder))
        return holder is not None

    def _wait_for(self, task: Task, holder: str) -> None:
        if task.number not in self._not_before:
            self._live.elsewhere(task.number, holder)
        self._not_before[task.number] = time.monotonic() + BUSY_SECONDS

    def _start(self, job: _Job) -> None:
        number, share = job.task.number, job.share
        arguments: Mapping[str, object] = {
            "folder": self._folder,
            "number": number,
            "overrides": job.task.overrides,
            "config_name": self._config_name,
            "recipe": job.recipe,
            "log_levels": self._log_levels,
        }
        log = job_dir(self._folder, number) / "logs" / CONSOLE
        order = Order(
            number,
            TARGET,
            arguments,
            log=None if self._machine.jobs == 1 else str(log),
            environment=share.environment,
            cwd=os.getcwd(),
            command=self._command,
            resources=share.resources,
        )
        self._jobs[number] = job
        if not self._machine.has_queue:  # the line goes before the job's own
            self._show(job)
        self._group.start({number: partial(self._server.start, order)})

    def _show(self, job: _Job) -> None:
        if not job.is_shown:
            job.is_shown = True
            self._live.started(job.task.number, job.task.overrides, job.recipe)

    # -- ending ----------------------------------------------------------------------------

    def _take(self, ended: Mapping[int, int]) -> None:
        for number, process in self._group.running.items():
            if process.pid:
                self._show(self._jobs[number])
        for number, status in ended.items():
            self._ended(self._jobs.pop(number), status)

    def _ended(self, job: _Job, status: int) -> None:
        task = job.task
        self._machine.give_back(job.share)
        if status == attempt.BUSY:
            self._wait_for(task, "another command")
            self._queue.append(task)
            return
        code = self._code_of(status)
        if code != DONE:
            how = f"its process {describe_exit(status)}"
            code = attempt.record_death(self._folder, task.number, code, how)
        self._codes[task.number] = code
        self._live.ended(task.number, code, status)

    def _code_of(self, status: int) -> int:
        if status >= 0:
            return status
        if -status in STOP_SIGNALS and self.is_stopped:  # before it could listen
            return STOPPED
        return INTERRUPTED if -status == signal.SIGINT else FAILED
