"""Warm workers: a server that has imported torch, and forks a process for each job of a sweep.

The server is a fresh interpreter that imports and does nothing else: it computes nothing, starts no
thread and touches no device, so that a fork is like a fresh process that has its imports behind it.
Each job is a process of its own, which leaves no state to the next. When the server's parent ends,
however it ends, the pipe closes, and the server kills the jobs; when the server ends, each job
notices and ends its process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from accel.machine import env, parent_watch
from runner.launch import group, rank_logs, worker
from runner.runs import numerics
from runner.sweep import preload
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS

# What a run of the built-in parts imports.
PRELOADED = (
    *preload.RUN,
    *(module for modules in preload.OF_FACTORIES.values() for module in modules),
    *("runner.builtin.digits", "runner.sweep.attempt"),
)
# With it, looking for GPUs starts no CUDA context, which a fork could not use.
# Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# How long the server may take to end once its pipe is closed.
END_SECONDS = 5.0


@dataclass(frozen=True)
class Order:
    """A job to be forked.

    Args:
        number: of the job.
        target: "module:function", called with `arguments`; returns the exit code.
        arguments: by name.
        log: file that gets the job's output; None: the server's own.
        environment: variables of the job; None removes one.
        cwd: its working directory.
        command: the command line that it belongs to.
        resources: of a cluster, by name.
    """

    number: int
    target: str
    arguments: Mapping[str, object]
    log: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    cwd: str = "."
    command: Sequence[str] = ()
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A job was started in process `pid` (`status` is None), or ended with an exit status.

    The status is negative for a signal, as that of `subprocess`.
    """

    number: int
    pid: int
    status: int | None = None


class ServerDied(Exception):
    """The server was killed, and its jobs with it."""


class ForkServer:
    """The parent's side of a server; starts it at once, and does not wait for its imports."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self._modules = tuple(modules)
        self._used = False
        self._process, self._pipe = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        pipe, theirs = Pipe()
        order = {
            "path": [str(Path(__file__).resolve().parents[2]), os.getcwd()],
            "pipe": theirs.fileno(),
            "preload": self._modules,
            "environment": {NVML_CHECK: env.read(NVML_CHECK)},
        }
        with numerics.sleeping_when_idle(), env.patched(**{NVML_CHECK: "1"}):
            process = subprocess.Popen(
                group.command(__name__, order),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent
            )
        theirs.close()
        return process, pipe

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def start(self, order: Order) -> None:
        """Have a job forked; an `Event` tells its process id.

        Raises:
            ServerDied: if the server has ended; the next call starts another.
        """
        self._used = True
        try:
            self._pipe.send((order.number, pickle.dumps(order)))
        except OSError as error:
            raise self._restarted() from error

    def events(self, seconds: float) -> list[Event]:
        """Return what has happened, after at most so many seconds.

        Raises:
            ServerDied: if the server has ended; another is started.
        """
        found: list[Event] = []
        try:
            while self._pipe.poll(0.0 if found else seconds):
                found.append(self._pipe.recv())
        except (EOFError, OSError) as error:
            if not found:
                raise self._restarted() from error
        return found

    def send(self, event: Event, number: int) -> None:
        """Send a signal to the job of an event; SIGKILL goes to its children, too."""
        with contextlib.suppress(ProcessLookupError):
            if event.pid and number == signal.SIGKILL:
                os.killpg(event.pid, number)
            elif event.pid:
                os.kill(event.pid, number)

    def _restarted(self) -> ServerDied:
        status = self._process.wait()
        self._pipe.close()
        self._process, self._pipe = self._start()
        return ServerDied(f"the server of the sweep's processes ended with status {status}")

    def close(self) -> None:
        """End the server and every job that still runs."""
        self._pipe.close()
        if not self._used:  # it may still import: a command that is refused does not wait
            self._process.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- the server ----------------------------------------------------------------------------


def main(settings: Mapping[str, Any]) -> None:
    """Serve until the parent closes the pipe; in a fork, be the job and exit with its code."""
    for number in HEARD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(settings["pipe"])
    preload.preload(settings["preload"])
    server, order = os.getpid(), _serve(pipe)
    if order is not None:
        env.set_values(settings["environment"])
        be(order, server)


def _serve(pipe: Connection) -> bytes | None:
    """Fork jobs; return None at the end, and in each fork its pickled order.

    Nothing of an order is imported here, where every later job would have it.
    """
    wake, woken = os.pipe()
    for descriptor in (wake, woken):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken)
    jobs: dict[int, int] = {}
    try:
        while True:
            if pipe in wait([pipe, wake]):
                number, pickled = pipe.recv()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (wake, woken):
                        os.close(descriptor)
                    pipe.close()
                    return pickled
                with contextlib.suppress(OSError):  # it has done so itself
                    os.setpgid(pid, pid)
                jobs[pid] = number
                pipe.send(Event(number, pid))
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 12)
            for pid, status in _ended(jobs):
                pipe.send(Event(jobs.pop(pid), pid, status))
    except (EOFError, OSError):  # the parent has ended
        for pid in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return None


def _ended(jobs: Mapping[int, int]) -> list[tuple[int, int]]:
    found = []
    for pid in jobs:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def be(pickled: bytes, parent: int) -> None:
    """Be the process of a job, and exit with its code."""
    parent_watch.die_with(parent)
    order: Order = pickle.loads(pickled)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An actor of Ray's holds them back until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_SIGNALS)
    if order.log is not None:
        log = Path(order.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        rank_logs.redirect(log)
    rank_logs.close_input()
    os.chdir(order.cwd)
    env.set_values(order.environment)
    preload.forget_random_state()
    sys.orig_argv[:] = order.command
    from accel.machine.imports import load_attribute
    from runner.recipe import paths, trust

    paths.move_project_last()
    trust.import_packages()
    worker.end_process(load_attribute(order.target)(**order.arguments))
