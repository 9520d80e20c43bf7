"""Processes that are started, watched, signalled and ended together; nothing else does that.

A run on this machine, a node's part of a run, a run in a Ray cluster and the jobs of a sweep are
groups. Stop signals are collected by `Stops` and forwarded by `Group.poll`: no handler calls
anything. Ctrl-C, a closed terminal and SIGQUIT raise a KeyboardInterrupt. No process outlives its
parent: each watches it (`accel.machine.parent_watch`). Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from runner.exit_codes import DONE
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS, handlers_restored, signals_blocked

MONITOR_SECONDS = 0.1
# Between "end now" and SIGKILL: to close the progress bar and to flush files.
GRACE_SECONDS = 3.0
# For a killed process to be noticed.
KILLED_SECONDS = 10.0
INTERRUPTS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Handle(Protocol):
    """A process that was started, here or on another machine."""

    @property
    def pid(self) -> int:
        """Its process id; 0: it has none yet."""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None: it runs."""

    def send(self, number: int) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """Kill it and its children, also those that it has left behind."""


Maker = Callable[[], Handle]


def kill_group(leader: int) -> None:
    """Kill the process group that `leader` leads, if a process of it is left.

    Data loaders of a worker that died stay behind in it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def search_path(cwd: str | None = None) -> list[str]:
    """Return what a fresh interpreter adds to `sys.path`: this package's folder and `cwd`."""
    return [str(Path(__file__).resolve().parents[2]), cwd or os.getcwd()]


def bootstrap(module: str) -> str:
    """Return code of a fresh interpreter that calls ``module.main(order)``.

    The order is JSON, the first argument; its "path" is added to the end of `sys.path`.
    """
    return (
        "import json, sys; order = json.loads(sys.argv[1]); "
        "sys.path.extend(path for path in order['path'] if path not in sys.path); "
        f"from {module} import main; main(order)"
    )


def command(module: str, order: Mapping[str, Any], cwd: str | None = None) -> list[str]:
    """Return the command of a fresh interpreter that calls ``module.main`` with an order.

    It gets the `search_path`.

    With -P nothing in the working directory is taken for `accel`, `runner` or a module of the
    standard library; the user's code is found behind everything else.
    """
    sent = json.dumps({"path": search_path(cwd), **order})
    return [sys.executable, "-P", "-c", bootstrap(module), sent]


class Stops:
    """The stop signals that this process has got, oldest first; each is forwarded at once, too."""

    def __init__(self, forward: Callable[[int], object] = lambda number: None) -> None:
        self.received: list[int] = []
        self._forward = forward

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Take a stop signal: of this process, or one that another node has got."""
        self.received.append(number)
        self._forward(number)

    def interrupt(self, number: int, frame: FrameType | None = None) -> None:
        """Take Ctrl-C."""
        signal.signal(number, signal.default_int_handler)
        self._forward(number)
        raise KeyboardInterrupt


@contextlib.contextmanager
def stops_heard(forward: Callable[[int], object] = lambda number: None) -> Iterator[Stops]:
    """Listen in the context, and restore the handlers after it; within another one, give its stops.

    Only the main thread may set handlers: in another one nothing is heard. `forward` is for what no
    `Group` polls: processes of Hydra's launchers.
    """
    around = getattr(signal.getsignal(STOP_SIGNALS[0]), "__self__", None)
    stops = around if isinstance(around, Stops) else Stops(forward)
    if stops is around or threading.current_thread() is not threading.main_thread():
        yield stops
        return
    with handlers_restored((*STOP_SIGNALS, *INTERRUPTS)) as before:
        for number in STOP_SIGNALS:
            signal.signal(number, stops.take)
        for number in INTERRUPTS:  # a shell lets background jobs ignore Ctrl-C; they still do
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, stops.interrupt)
        yield stops


@dataclass(frozen=True)
class Failure:
    """The end of a process that failed.

    Attributes:
        status: its exit status; negative: minus the number of the signal that ended it.
        time: seconds since the epoch at which it was last seen alive.
    """

    status: int
    time: float


class Group:
    """Processes by number: ranks of a run, or jobs of a sweep.

    Those that do not `save` at a stop signal do not get it: `run` ends them.
    """

    def __init__(self, stops: Stops, *, save: bool = True) -> None:
        self._stops, self._save, self._forwarded = stops, save, 0
        self._started: list[Handle] = []
        self.running: dict[int, Handle] = {}

    def start(self, makers: Mapping[int, Maker]) -> None:
        """Start processes; a signal that comes meanwhile waits until all can be told."""
        with signals_blocked(HEARD_SIGNALS):
            for number, make in makers.items():
                self.running[number] = make()
                self._started.append(self.running[number])

    def poll(self) -> dict[int, int]:
        """Forward the signals that have come; return who has ended since, with the status."""
        received = self._stops.received[self._forwarded :]
        self._forwarded += len(received)
        for number in received if self._save else ():
            self.send(number)
        found = {number: handle.poll() for number, handle in self.running.items()}
        ended = {number: status for number, status in found.items() if status is not None}
        for number in ended:
            del self.running[number]
        return ended

    def run(
        self,
        makers: Mapping[int, Maker],
        finished: Callable[[int], bool] = lambda number: True,
        meanwhile: Callable[[], bool | None] = lambda: None,
    ) -> dict[int, Failure]:
        """Run processes to the end of all, or to the first failure; then the others are ended.

        Args:
            makers: start the processes, by number.
            finished: whether a process that has exited with 0 had come to its end.
            meanwhile: called several times a second; where it returns True, all are ended.

        Returns:
            How those ended that failed first, without those that were ended because of it.
        """
        failed: dict[int, Failure] = {}
        seen = time.time()
        try:
            self.start(makers)
            while self.running and not failed and (self._save or not self._stops.received):
                for number, status in self.poll().items():
                    if status != DONE or not finished(number):
                        failed[number] = Failure(status, seen)
                seen = time.time()
                if meanwhile():
                    break
                if self.running and not failed:
                    time.sleep(MONITOR_SECONDS)
            return failed
        finally:
            self.close()

    def send(self, number: int) -> None:
        """Send a signal to those that run."""
        for handle in self.running.values():
            handle.send(number)

    def end(self, grace: float = GRACE_SECONDS) -> dict[int, int]:
        """Interrupt those that run, and kill those that do not end soon; return their statuses."""
        self.send(signal.SIGINT)
        ended = self._ends(grace)
        for handle in self.running.values():
            handle.kill()
        return ended | self._ends(KILLED_SECONDS)

    def _ends(self, seconds: float) -> dict[int, int]:
        deadline, ended = time.monotonic() + seconds, self.poll()
        while self.running and time.monotonic() < deadline:
            time.sleep(MONITOR_SECONDS / 4)
            ended |= self.poll()
        return ended

    def close(self) -> None:
        """End those that run, and kill what any has left behind."""
        self.end()
        for handle in self._started:
            handle.kill()
