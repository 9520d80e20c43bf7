"""Jobs of a sweep at once: started as they fit, watched, stopped together.

A job that another command trains (its run directory is locked) is waited for, and taken over where
that command was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch.fork_server import Order
from runner.launch.group import Group, Handle, Stops, stops_heard
from runner.recipe.schema import Recipe
from runner.runs import lock, sessions
from runner.runs.outcomes import Outcome, describe_exit
from runner.runs.record import RunRecord
from runner.sweep.devices import Share
from runner.sweep.live import Live
from runner.sweep.sweep import job_dir
from runner.training.stopping import STOP_SIGNALS

TARGET = "runner.sweep.job:run"
CONSOLE = "console.log"
POLL_SECONDS = 0.2
# How long Ctrl-C waits for jobs to end by themselves.
INTERRUPT_SECONDS = 8.0


@dataclass
class Job:
    """A job to be trained: its number, its overrides, and its recipe when it starts."""

    number: int
    overrides: tuple[str, ...]
    recipe: Callable[[], Recipe]


class Server(Protocol):
    """Starts processes of jobs: a fork server on this machine, or a cluster."""

    def start(self, order: Order) -> Handle: ...

    def wait(self, seconds: float) -> None:
        """Wait so long, or until something has happened."""


class Places(Protocol):
    """Says which jobs fit now; `jobs` is 1 where they run one after the other."""

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
        self._log_levels = log_levels or {}
        self._queue: deque[Job] = deque()
        self._shares: dict[int, Share] = {}
        self._told: set[int] = set()  # jobs that another command was seen to train
        self._codes: dict[int, int] = {}
        self._stops = Stops()
        self._group: Group = Group(self._stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal came: no further job starts, and those that run save and end."""
        return bool(self._stops.received)

    def run(self, jobs: Sequence[Job]) -> dict[int, int]:
        """Train jobs; return the exit code of each that was started, by number.

        Raises:
            KeyboardInterrupt: on Ctrl-C, when no job is left.
        """
        self._queue = deque(jobs)
        with stops_heard() as self._stops:
            self._group = Group(self._stops)
            try:
                while self._shares or (self._queue and not self.is_stopped):
                    self._start_what_fits()
                    self._server.wait(POLL_SECONDS)
                    self._take(self._group.poll())
                    self._live.update()
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._take(self._group.end(INTERRUPT_SECONDS))
                raise
        return dict(self._codes)

    def _start_what_fits(self) -> None:
        for _ in range(len(self._queue)):
            if self.is_stopped:
                return
            job = self._queue.popleft()
            if (holder := lock.holder(job_dir(self._folder, job.number))) is not None:
                if job.number not in self._told:
                    self._live.elsewhere(job.number, str(holder))
                self._told.add(job.number)
                self._queue.append(job)
                continue
            recipe = job.recipe()
            share = self._machine.share_of(recipe)
            if share is None:
                self._queue.appendleft(job)
                return
            self._start(job, recipe, share)

    def _start(self, job: Job, recipe: Recipe, share: Share) -> None:
        number = job.number
        arguments: Mapping[str, object] = {
            "folder": self._folder,
            "number": number,
            "overrides": job.overrides,
            "config_name": self._config_name,
            "recipe": recipe,
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
        self._shares[number] = share
        self._live.started(number, job.overrides, recipe)
        self._group.start({number: partial(self._server.start, order)})

    def _take(self, ended: Mapping[int, int]) -> None:
        for number, status in ended.items():
            self._machine.give_back(self._shares.pop(number))
            code = self._code_of(status)
            if code != DONE:
                how = f"its process {describe_exit(status)}"
                code = record_death(job_dir(self._folder, number), code, how)
            self._codes[number] = code
            self._live.ended(number, code, status)

    def _code_of(self, status: int) -> int:
        if status >= 0:
            return status
        if -status in STOP_SIGNALS and self.is_stopped:  # before it could listen
            return STOPPED
        return INTERRUPTED if -status == signal.SIGINT else FAILED


def record_death(run_dir: Path, code: int, how: str) -> int:
    """Record the end of a job whose process died without a word, unless it is trained again.

    Returns:
        The exit code of the job, which may have come to its end before its process died.
    """
    if RunRecord(run_dir).is_done:
        return DONE
    for session in sessions.of_run(run_dir)[-1:]:
        with contextlib.suppress(lock.HeldError), lock.held(run_dir):
            sessions.end(session, code, cause=asdict(Outcome(0, time.time(), code, how)))
    return code
