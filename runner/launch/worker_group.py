"""A group of worker processes on this machine, under torch's elastic agent.

The agent (`LocalElasticAgent`) gives each worker RANK, WORLD_SIZE, MASTER_ADDR, … and a store that
it hosts itself, so that no port is chosen twice. Changes to it here:

* The agent's signal handlers raise an exception and end the workers; ours hand SIGTERM and SIGUSR1
  on to the workers, which save and stop, and leave Ctrl-C to Python.
* When one worker has failed, the agent asks the others to end with SIGTERM, which here means *save
  and stop*, and waits 30 s. Nothing can be saved then; they are interrupted and soon killed.
* Data-loading processes of a worker that died stay behind; the worker's process group is killed.

Source: https://docs.pytorch.org/docs/stable/elastic/agent.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel import env
from runner.training.stopping import (
    STOP_SIGNALS,
    TORCHS_SIGNALS,
    handlers_restored,
    signals_blocked,
)

MONITOR_SECONDS = 0.1
# Time between "end now" and SIGKILL: to close the progress bar and to flush files.
GRACE_SECONDS = 3.0
HANDLED = (*STOP_SIGNALS, signal.SIGINT)
# Signals that the agent installs handlers for.
AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """The end of a worker that failed.

    Attributes:
        status: its exit status; negative: minus the number of the signal that ended it.
        time: seconds since the epoch at which it was last seen alive.
    """

    status: int
    time: float


def run_group(
    command: Sequence[str], num_processes: int, finished: Callable[[int], bool] = lambda rank: True
) -> dict[int, Failure]:
    """Run `command` in `num_processes` processes and wait for their end.

    `finished` tells whether the rank that has exited with 0 had come to its end.

    Returns:
        How each rank ended that failed, not those that were ended because of it. Empty: all have
        finished.

    Raises:
        KeyboardInterrupt: on Ctrl-C, when no process is left.
    """
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )
    spec = _worker_spec(command, num_processes, rendezvous)
    agent = GroupAgent(spec, _InheritedStreams(), finished)
    with quiet_agent(), agent_handlers_restored():
        try:
            agent.take_signals()
            agent.run()
        except SignalException as error:  # an `Exception`: a sweep would start the next job
            raise KeyboardInterrupt(str(error)) from error
        finally:
            agent.kill_groups()
            rendezvous.shutdown()
    return agent.failed


def _worker_spec(
    command: Sequence[str], num_processes: int, rendezvous: RendezvousHandler
) -> WorkerSpec:
    return WorkerSpec(
        role="runner",
        local_world_size=num_processes,
        entrypoint=command[0],
        # The agent expands ${local_rank} in arguments.
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        local_addr="localhost",
    )


class GroupAgent(LocalElasticAgent):
    """The elastic agent, with the endings described above."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        finished: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._finished = finished
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._early: list[int] = []  # signals from before there was anybody to hand them on to
        self._ignores_interrupt = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        self._seen: dict[int, float] = {}  # when each rank was last seen alive
        self.failed: dict[int, Failure] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        # A signal that comes before a worker can handle it would kill it. So signals are held back
        # here and, by inheritance, in the workers, which release them when they are ready. Other
        # threads of this process may take one meanwhile: torch does not change the handlers.
        with signals_blocked(HANDLED), env.patched(**{TORCHS_SIGNALS: "SIGHUP,SIGQUIT"}):
            pids = super()._start_workers(worker_group)
            context: Any = self._pcontext
            handlers = context.subprocess_handlers
            self._processes = {rank: handlers[rank].proc for rank in sorted(handlers)}
            self.take_signals()  # older versions of torch have replaced the handlers all the same
        for number in self._early:
            self._forward(number, None)
        return pids

    def take_signals(self) -> None:
        """Hand stop signals on to the workers from now on, those that are yet to start included."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)
        # A shell lets background jobs ignore Ctrl-C; they still do.
        signal.signal(
            signal.SIGINT, signal.SIG_IGN if self._ignores_interrupt else signal.default_int_handler
        )

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self._processes:
            self._early.append(number)
        for process in self._processes.values():
            process.send_signal(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        now = time.time()
        for rank, code in codes.items():
            if code is None:
                self._seen[rank] = now
            elif rank not in self.failed and (code or not self._finished(rank)):
                self.failed[rank] = Failure(code, self._seen.get(rank, 0.0))
        if self.failed:
            self._end_workers()
        elif None in codes.values():  # torch, looking a moment later, might see another end first
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._end_workers()
        super()._shutdown(*args, **options)

    def _end_workers(self) -> None:
        """Interrupt the workers that are left; kill those that do not end soon."""
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process.pid)
                process.wait()

    def _construct_event(
        self, state: str, source: EventSource, *args: object, **options: object
    ) -> Event:
        # The agent's own looks up this host's full name each time, which takes seconds where no
        # name server answers. Nobody reads these events.
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def kill_groups(self) -> None:
        """Kill the remaining processes of workers: data loaders of one that crashed."""
        for process in self._processes.values():
            kill_group(process.pid)


def kill_group(leader: int) -> None:
    """Kill the process group that `leader` leads, if a process of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class _InheritedStreams(LogsSpecs):
    """Workers start with the parent's streams; they redirect themselves (`rank_logs`)."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = range(len(envs))
        return LogsDest(
            stdouts=dict.fromkeys(ranks, ""),
            stderrs=dict.fromkeys(ranks, ""),
            tee_stdouts={},
            tee_stderrs={},
            error_files=dict.fromkeys(ranks, os.devnull),
        )

    @property
    def root_log_dir(self) -> str:
        return os.devnull


@contextlib.contextmanager
def agent_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that the agent or this module replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield  # nobody may set handlers here
        return
    with handlers_restored({*HANDLED, *AGENT_SIGNALS}):
        yield


@contextlib.contextmanager
def quiet_agent() -> Iterator[None]:
    """Keep the agent's own messages from the terminal: it names exit codes, not causes."""
    prefix = "torch.distributed.elastic"
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
