"""Workers that are forked from the command once it has imported what they need.

A command that starts processes on this machine's CPUs imports PyTorch for its own checks. Workers
that are forked right after that, before anything computes, starts a thread or runs the user's code,
have their imports behind them; they wait for their orders while the command checks the recipe. What
computes on GPUs, and the workers of later attempts, are fresh interpreters.

Free of torch at import.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from runner.launch import preload
from runner.recipe import processes
from runner.recipe.schema import Recipe
from runner.run_dir import numerics
from runner.training.stopping import HEARD_SIGNALS

WAIT_SECONDS = 0.01
PARENT_SECONDS = 0.5  # between looks whether the command still lives
END_SECONDS = 5.0
MOST = 64  # a number that is refused a moment later starts no thousands of processes


class Began(BaseException):
    """This process is a worker, and has its order: the top of its stack calls `be`."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__("a worker began")
        self.order = order


class ForkedWorker:
    """A forked process, which waits for its order; afterwards as a `subprocess.Popen`."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe
        self.returncode: int | None = None

    def begin(self, order: str, environment: Mapping[str, str]) -> None:
        """Give it the order of `runner.launch.worker.main`, as JSON, and its variables.

        Raises:
            OSError: if it has ended.
        """
        message = {"order": json.loads(order), "environment": dict(environment)}
        self._send(json.dumps(message).encode())

    def dismiss(self) -> None:
        """End it: there is no order."""
        with contextlib.suppress(OSError):  # it has ended
            self._send(b"")
        try:
            self.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self.wait()

    def _send(self, message: bytes) -> None:
        # The end of the line ends the message: the end of the file would not come while a process
        # that the user's code has forked holds the pipe.
        with open(self._pipe, "wb") as pipe:
            pipe.write(message + b"\n")

    def poll(self) -> int | None:
        """Return the exit status (negative: minus the number of a signal); None: it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: the status is lost, as in `subprocess`
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["a forked worker"], timeout or 0.0)
            time.sleep(WAIT_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Ahead:
    """The workers of this command that wait, and whether it may fork any: a program, no library."""

    def __init__(self) -> None:
        self.is_allowed = False
        self.waiting: list[ForkedWorker] = []


_ahead = _Ahead()


def allow() -> None:
    """Allow forks: this process is the command alone, which handles `Began`."""
    _ahead.is_allowed = True


@contextlib.contextmanager
def forked(recipe: Recipe) -> Iterator[None]:
    """Fork the workers of a recipe, where they can be; those that nobody took end after it.

    Raises:
        Began: in each of them, when it has its order.
    """
    number = _number(recipe)
    if number > 1:
        # As in a fresh worker, which has the variable before numeric libraries are loaded.
        threads = numerics.threads(recipe, number)
        with numerics.Numerics(threads, recipe.deterministic).exported():
            preload.preload((*preload.RUN, *_modules(recipe)))
        if threading.active_count() == 1:
            _fork(min(number, MOST))
    try:
        yield
    finally:
        for worker in take(number):
            worker.dismiss()


def take(number: int) -> list[ForkedWorker]:
    """Return up to so many workers that wait; they are the caller's from now on."""
    taken, _ahead.waiting = _ahead.waiting[:number], _ahead.waiting[number:]
    return taken


def be(order: Mapping[str, Any]) -> NoReturn:
    """Be the worker with this order, and exit."""
    from runner.launch import worker

    worker.main(order)


def _number(recipe: Recipe) -> int:
    # On macOS, forks of a process that has loaded the system's frameworks are not safe.
    if not _ahead.is_allowed or sys.platform != "linux":
        return 0
    if recipe.distributed.kind != "multi_cpu":
        return 0
    if sys.gettrace() is not None or sys.getprofile() is not None:  # a debugger's, a profiler's
        return 0
    if processes.adopted() is not None:
        return 0
    return recipe.distributed.num_processes or processes.DEFAULT_CPU_PROCESSES


def _modules(recipe: Recipe) -> list[str]:
    """Return what the built-in factories of a recipe import."""
    from runner.recipe import factory as nodes

    found: list[str] = []
    for place in nodes.builtin_places(recipe):
        found += [place.partition(":")[0], *preload.OF_FACTORIES.get(place, ())]
    return found


def _fork(number: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)
    try:
        for _ in range(number):
            theirs, ours = os.pipe()
            pid = os.fork()
            if pid == 0:
                for file in (ours, *(worker._pipe for worker in _ahead.waiting)):
                    os.close(file)  # else it would keep another one waiting
                _ahead.waiting.clear()
                _wait_for_order(theirs, parent)
            os.close(theirs)
            with contextlib.suppress(OSError):  # it has done so itself
                os.setpgid(pid, pid)
            _ahead.waiting.append(ForkedWorker(pid, ours))
    finally:
        if os.getpid() == parent:  # a worker releases them when it is ready
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_order(pipe: int, parent: int) -> None:
    os.setpgid(0, 0)
    waiter = select.poll()
    waiter.register(pipe, select.POLLIN)
    while not waiter.poll(1000 * PARENT_SECONDS):
        if os.getppid() != parent:  # it was killed
            os._exit(0)
    with open(pipe, "rb") as file:
        message = file.readline().strip()
    if not message:  # the command was refused, or has ended
        os._exit(0)
    content = json.loads(message)
    preload.forget_random_state()
    order = content["order"]
    sys.path.extend(path for path in order["path"] if path not in sys.path)
    raise Began(
        {**order, "environment": {**order.get("environment", {}), **content["environment"]}}
    )
