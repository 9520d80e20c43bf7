"""Jobs of a sweep at once on this machine: started as they fit, watched, stopped together.

A job that another command trains (its run directory is locked) is waited for, and taken over where
that command was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.recipe.schema import Recipe
from runner.runs import lock
from runner.runs.outcomes import describe_exit
from runner.sweep import attempt
from runner.sweep.devices import Share
from runner.sweep.fork_server import Event, Order, ServerDied
from runner.sweep.live import Live
from runner.training.stopping import STOP_SIGNALS, handlers_restored

TARGET = "runner.sweep.pool:train"
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
class _Running:
    task: Task
    recipe: Recipe
    share: Share
    pid: int = 0


def train(
    folder: str,
    number: int,
    overrides: Sequence[str],
    config_name: str,
    recipe: Recipe,
    log_levels: Mapping[str, str] | None = None,
) -> int:
    """Train one job in this process, a fork of the server; return its exit code."""
    return attempt.run(Path(folder), number, overrides, config_name, recipe, log_levels=log_levels)


class Server(Protocol):
    """Starts processes of jobs: a fork server on this machine, or a cluster."""

    def start(self, order: Order) -> None: ...

    def events(self, seconds: float) -> list[Event]: ...

    def send(self, event: Event, number: int) -> None: ...


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
        target: str = TARGET,
    ) -> None:
        self._server, self._folder, self._config_name = server, folder, config_name
        self._machine, self._live, self._command = machine, live, command
        self._log_levels, self._target = log_levels, target
        self._queue: deque[Task] = deque()
        self._running: dict[int, _Running] = {}
        self._not_before: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self.stopped_by: int | None = None

    def run(self, tasks: Sequence[Task]) -> dict[int, int]:
        """Train jobs; return the exit code of each that was started, by number.

        After a stop signal (`stopped_by`) no further job starts; those that run save and end.

        Raises:
            KeyboardInterrupt: on Ctrl-C, when no job is left.
        """
        self._queue, self._codes = deque(tasks), {}
        with self._signals_forwarded():
            try:
                while self._running or (self._queue and self.stopped_by is None):
                    self._start_what_fits()
                    self._handle_events(POLL_SECONDS)
                    self._live.update()
            except KeyboardInterrupt:
                self._interrupt()
                raise
        return dict(self._codes)

    # -- starting --------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        for _ in range(len(self._queue)):
            if self.stopped_by is not None:
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
            self._start(task, recipe, share)

    def _is_busy(self, task: Task) -> bool:
        """Return whether another command trains a job; asked again only after a while."""
        if self._not_before.get(task.number, 0.0) > time.monotonic():
            return True
        holder = lock.holder(self._folder / f"{task.number:04}")
        if holder is not None:
            self._wait_for(task, str(holder))
        return holder is not None

    def _wait_for(self, task: Task, holder: str) -> None:
        if task.number not in self._not_before:
            self._live.elsewhere(task.number, holder)
        self._not_before[task.number] = time.monotonic() + BUSY_SECONDS

    def _start(self, task: Task, recipe: Recipe, share: Share) -> None:
        arguments: Mapping[str, object] = {
            "folder": str(self._folder),
            "number": task.number,
            "overrides": task.overrides,
            "config_name": self._config_name,
            "recipe": recipe,
            "log_levels": self._log_levels,
        }
        alone = self._machine.jobs == 1
        log = self._folder / f"{task.number:04}" / "logs" / CONSOLE
        order = Order(
            task.number,
            self._target,
            arguments,
            log=None if alone else str(log),
            environment=share.environment,
            cwd=os.getcwd(),
            command=self._command,
            resources=share.resources,
        )
        self._running[task.number] = _Running(task, recipe, share)
        if not self._machine.has_queue:  # the line goes before the job's own
            self._live.started(task.number, task.overrides, recipe)
        try:
            self._server.start(order)
        except ServerDied as error:
            self._all_died(error)

    # -- ending ----------------------------------------------------------------------------

    def _handle_events(self, seconds: float) -> None:
        try:
            events = self._server.events(seconds)
        except ServerDied as error:
            self._all_died(error)
            return
        for event in events:
            running = self._running.get(event.number)
            if running is None:
                continue
            if event.status is None:
                running.pid = event.pid
                if self._machine.has_queue:
                    self._live.started(event.number, running.task.overrides, running.recipe)
                if self.stopped_by is not None:  # the signal came before the process
                    self._send(running, self.stopped_by)
            else:
                self._ended(running, event.status)

    def _ended(self, running: _Running, status: int) -> None:
        task = running.task
        del self._running[task.number]
        self._machine.give_back(running.share)
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
        if -status in STOP_SIGNALS and self.stopped_by is not None:  # before it could listen
            return STOPPED
        return INTERRUPTED if -status == signal.SIGINT else FAILED

    def _all_died(self, error: ServerDied) -> None:
        self._live.note(f"{error}: the jobs that ran have failed")
        for running in list(self._running.values()):
            self._ended(running, -signal.SIGKILL)

    # -- signals ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            self.stopped_by = number
            for running in self._running.values():
                self._send(running, number)

        with handlers_restored((*STOP_SIGNALS, signal.SIGINT)) as before:
            for number in STOP_SIGNALS:
                signal.signal(number, forward)
            # A shell lets background jobs ignore Ctrl-C; they still do.
            if before[signal.SIGINT] is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield

    def _interrupt(self) -> None:
        """End the jobs that run, and wait for them."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.stopped_by = signal.SIGINT
        for running in self._running.values():
            self._send(running, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_SECONDS
        while self._running and time.monotonic() < deadline:
            self._handle_events(POLL_SECONDS)
        for running in list(self._running.values()):
            self._send(running, signal.SIGKILL)
        deadline = time.monotonic() + INTERRUPT_SECONDS
        while self._running and time.monotonic() < deadline:
            self._handle_events(POLL_SECONDS)

    def _send(self, running: _Running, number: int) -> None:
        self._server.send(Event(running.task.number, running.pid), number)
