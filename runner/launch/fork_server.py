"""Warm processes: a server that has imported torch forks the workers of a run, or jobs of a sweep.

The server is a fresh interpreter that imports and does nothing else: it computes nothing, starts no
thread and touches no device, so that a fork is like a fresh process that has its imports behind it.
Each worker or job is a process of its own, which leaves no state to the next. When the server's
parent ends, however it ends, the pipe closes, and the server ends; when the server ends, each of
these processes notices and ends its process group.

Stop signals are held back in the server. A fork inherits that, and its target releases them when it
is ready: none is lost before.

The standard library's fork server is no substitute: it imports with the working directory in front,
starts the main module again in each fork, and ends with the signals of a whole session.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from accel.machine import env, parent_watch
from accel.machine.imports import is_available, load_attribute
from runner.launch import group, rank_logs, worker
from runner.launch.group import Maker
from runner.launch.worker import TRAIN, Place
from runner.recipe import paths
from runner.runs import numerics
from runner.runs.numerics import Numerics
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS, signals_blocked

# What a run of the built-in parts imports. None of it starts a thread or asks for devices.
PRELOADED = (
    *("torch", "torch._dynamo", "torch.utils.tensorboard", "rich.progress"),
    *("accel.accelerator", "accel.checkpoint.save", "accel.checkpoint.load", "accel.comm.local"),
    *("runner.training.build", "runner.training.loop", "runner.launch.hangs"),
    *("runner.data.batches", "runner.builtin.digits", "runner.sweep.job"),
    *("sklearn.datasets", "sklearn.model_selection"),  # of the built-in data sets
)
WORKER = "runner.launch.worker:serve"
# With it, looking for GPUs starts no CUDA context, which a fork could not use.
# Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class Order:
    """What a process is to do that will be forked: a worker, or a job of a sweep.

    Args:
        number: rank of the worker, or number of the job.
        target: "module:function", called with `arguments`; returns the exit code.
        arguments: by name.
        log: file that gets the process's output; None: the server's own.
        environment: variables of the process; None removes one.
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


def workers(folder: Path, place: Place, cwd: str, target: str = TRAIN) -> list[Order]:
    """Return the orders of the workers of a node.

    Args:
        folder: the session with the frozen job.
        place: of the workers.
        cwd: the user's directory: code in it can be imported.
        target: see `worker.serve`.
    """
    arguments, line = {"folder": folder, "target": target}, tuple(sys.orig_argv)
    return [
        Order(rank, WORKER, arguments, None, place.of_rank(rank, folder.name), cwd, line)
        for rank in place.ranks
    ]


class Fork:
    """A process of the server's, as a handle; `pid` is 0 until it is forked."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.pid = 0
        self.status: int | None = None
        self._early: list[int] = []  # signals from before it was forked

    def forked(self, pid: int) -> None:
        """Take the process id."""
        self.pid = pid
        for number in self._early:
            self.send(number)

    def poll(self) -> int | None:
        """Return the exit status; None: it runs. With the server it is killed."""
        self._server.read()
        return self.status

    def send(self, number: int) -> None:
        """Send a signal."""
        if not self.pid:
            self._early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.pid:
            group.kill_group(self.pid)


class ForkServer:
    """The parent's side of a server; starts it at once, and does not wait for its imports.

    Numeric libraries are loaded there as `how` says; each process chooses for torch once more.
    """

    def __init__(self, how: Numerics | None = None, modules: Sequence[str] = PRELOADED) -> None:
        self._numerics, self._modules = how or Numerics(), tuple(modules)
        self._forks: dict[int, Fork] = {}
        self._process, self._pipe = self._started()

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        pipe, theirs = Pipe()
        order = {
            "pipe": theirs.fileno(),
            "preload": self._modules,
            "environment": {NVML_CHECK: env.read(NVML_CHECK)},
        }
        with (
            self._numerics.exported(),
            numerics.sleeping_when_idle(),
            env.patched(**{NVML_CHECK: "1"}),
        ):
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

    def makers(
        self, folder: Path, place: Place, cwd: Path, target: str = TRAIN
    ) -> dict[int, Maker]:
        """Return what starts the workers of a node, by rank; arguments are those of `workers`."""
        found = workers(folder, place, str(cwd), target)
        return {order.number: partial(self.start, order) for order in found}

    def start(self, order: Order) -> Fork:
        """Have a job forked."""
        fork = self._forks[order.number] = Fork(self)
        try:
            self._pipe.send((order.number, pickle.dumps(order)))
        except OSError:
            self._restart()
        return fork

    def read(self, seconds: float = 0.0) -> None:
        """Take what the server says, after at most so many seconds."""
        wait([self._pipe], seconds)
        with signals_blocked(HEARD_SIGNALS):  # Ctrl-C must leave no half of a message
            try:
                while self._pipe.poll():
                    number, pid, status = self._pipe.recv()
                    if status is None:
                        self._forks[number].forked(pid)
                    else:
                        self._forks.pop(number).status = status
            except (EOFError, OSError):
                self._restart()

    wait = read

    def _restart(self) -> None:
        """Start another server in place of one that was killed, with its jobs."""
        for fork in self._forks.values():
            fork.status = -signal.SIGKILL
        self._forks.clear()
        self._process.wait()
        self._pipe.close()
        self._process, self._pipe = self._started()

    def close(self) -> None:
        """End the server and, by its end, every job that still runs."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def server_of(session: Path) -> contextlib.closing[ForkServer]:
    """Return a server for the workers of a session, to be entered."""
    return contextlib.closing(ForkServer(numerics.read(session)))


# -- the server ----------------------------------------------------------------------------


def main(settings: Mapping[str, Any]) -> None:
    """Serve until the parent closes the pipe; in a fork, be the job and exit with its code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)
    pipe = Connection(settings["pipe"])
    preload(settings["preload"])
    server, order = os.getpid(), _serve(pipe)
    if order is not None:
        env.set_values(settings["environment"])
        be(order, server)


def preload(modules: Sequence[str]) -> None:
    """Import modules, those that are installed."""
    gc.disable()  # it would go through all modules again and again while they are imported
    for name in modules:
        if is_available(name.partition(".")[0]):
            importlib.import_module(name)
    gc.freeze()  # the collector writes to the objects that it looks at, which would be copied
    gc.enable()


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
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
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
                pipe.send((number, pid, None))
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 12)
            for pid in list(jobs):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    pipe.send((jobs.pop(pid), pid, os.waitstatus_to_exitcode(status)))
    return None


def be(pickled: bytes, parent: int) -> None:
    """Be the process of an order, and exit with its code."""
    parent_watch.die_with(parent)
    order: Order = pickle.loads(pickled)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.log is not None:
        log = Path(order.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        rank_logs.redirect(log)
    rank_logs.close_input()
    os.chdir(order.cwd)
    env.set_values(order.environment)
    sys.orig_argv[:] = order.command
    paths.move_project_last()
    worker.end_process(load_attribute(order.target)(**order.arguments))
