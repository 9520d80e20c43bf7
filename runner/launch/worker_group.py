"""The worker processes of this machine in one attempt at a run: started, watched, ended.

Each worker gets torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, …) and a store that its
launcher hosts, a new one for each attempt: what an attempt that failed has written there is not
found by the next, and no port is chosen twice.

* SIGTERM and SIGUSR1 are handed on to the workers, which save and stop. Ctrl-C, a closed terminal
  and SIGQUIT raise a KeyboardInterrupt.
* When one worker has failed, nothing can be saved: the others are interrupted and soon killed.
* Data-loading processes of a worker that died stay behind; the worker's process group is killed.

Free of torch.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from accel.machine import env
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS, handlers_restored, signals_blocked

MONITOR_SECONDS = 0.1
# Time between "end now" and SIGKILL: to close the progress bar and to flush files.
GRACE_SECONDS = 3.0
INTERRUPTS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """The end of a worker that failed.

    Attributes:
        status: its exit status; negative: minus the number of the signal that ended it.
        time: seconds since the epoch at which it was last seen alive.
    """

    status: int
    time: float


@dataclass(frozen=True)
class Place:
    """The workers of one node among those of an attempt.

    Args:
        num_local: number of workers of this node.
        first_rank: rank of the first of them.
        world_size: number of workers of all nodes.
        node: index of this node.
        num_nodes: number of nodes.
        address: host of the store, as this node reaches it.
        port: TCP port of the store.
        run_id: name of the attempt.
        variables: further variables of the workers.
    """

    num_local: int
    first_rank: int
    world_size: int
    node: int
    num_nodes: int
    address: str
    port: int
    run_id: str
    variables: Mapping[str, str]

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.num_local)

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of one worker, in place of any that a launcher around has set."""
        rank = self.first_rank + local_rank
        own: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.num_local,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "runner",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": 0,  # of this store
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        return {**env.copy(), **self.variables, **{name: str(value) for name, value in own.items()}}


class WorkerGroup:
    """The workers of one attempt on this machine.

    `finished` tells whether the rank that has exited with 0 had come to its end. `on_start` is
    called with the process id of each rank.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        finished: Callable[[int], bool] = lambda rank: True,
        on_start: Callable[[Mapping[int, int]], None] = lambda pids: None,
    ) -> None:
        self._command, self._place, self._finished = list(command), place, finished
        self._on_start = on_start
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seen: dict[int, float] = {}  # when each rank was last seen alive
        # How each rank ended that failed, not those that were ended because of it.
        self.failed: dict[int, Failure] = {}

    def start(self) -> None:
        """Start the workers."""
        # A signal that comes before a worker can handle it would kill it. So signals are held back
        # here and, by inheritance, in the workers, which release them when they are ready.
        with signals_blocked(HEARD_SIGNALS):
            for local_rank, rank in enumerate(self._place.ranks):
                environment = self._place.environment(local_rank)
                self._processes[rank] = subprocess.Popen(
                    self._command, env=environment, process_group=0
                )
        self._on_start({rank: process.pid for rank, process in self._processes.items()})

    def poll(self) -> bool:
        """Note who has ended; return whether any worker runs."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        now = time.time()
        for rank, code in codes.items():
            if code is None:
                self._seen[rank] = now
            elif rank not in self.failed and (code or not self._finished(rank)):
                self.failed[rank] = Failure(code, self._seen.get(rank, 0.0))
        return None in codes.values()

    def wait(self) -> None:
        """Wait for the end of all workers, or of one that has failed."""
        while self.poll() and not self.failed:
            time.sleep(MONITOR_SECONDS)

    def forward(self, number: int) -> None:
        """Send a signal to the workers."""
        for process in self._processes.values():
            process.send_signal(number)

    def end(self) -> None:
        """Interrupt the workers that are left; kill those that do not end soon."""
        self.forward(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process.pid)
                process.wait()

    def close(self) -> None:
        """End the workers, and kill the rest of their process groups: loaders of one that died."""
        self.end()
        for process in self._processes.values():
            kill_group(process.pid)


def kill_group(leader: int) -> None:
    """Kill the process group that `leader` leads, if a process of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class Terminated(BaseException):
    """A stop signal came, and there is no state to save: the workers are ended."""


class StopSignals:
    """Hands stop signals on to the present workers, and to those yet to start.

    Workers that do not save are ended instead: the first signal raises `Terminated`. Those that
    were installed around these get every signal, too, and so know of one that came too late for a
    run that was complete.

    Attributes:
        received: the stop signals so far.
    """

    def __init__(self, *, save: bool = True) -> None:
        self.received: list[int] = []
        self._save = save
        self._group: WorkerGroup | None = None
        self._around: StopSignals | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Listen in the context; the handlers found there are restored after it."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # nobody may set handlers here
            return
        with handlers_restored((*STOP_SIGNALS, *INTERRUPTS)) as before:
            for number in STOP_SIGNALS:
                owner = getattr(before[number], "__self__", None)
                self._around = owner if isinstance(owner, StopSignals) else None
                signal.signal(number, self.take)
            if self._around is not None:  # what came after their last look
                self.received = [*self._around.received, *self.received]
            for number in INTERRUPTS:  # a shell lets background jobs ignore Ctrl-C; they still do
                if before[number] is not signal.SIG_IGN:
                    signal.signal(number, signal.default_int_handler)
            yield self

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Take a stop signal: of this process, or one that another node has got."""
        self.received.append(number)
        if self._around is not None:
            self._around.take(number)
        if not self._save:
            if len(self.received) == 1:  # coreutils' `timeout` sends two
                raise Terminated
        elif self._group is not None:
            self._group.forward(number)

    @contextlib.contextmanager
    def running(self, group: WorkerGroup) -> Iterator[WorkerGroup]:
        """Run a group in the context: it is started, gets the signals, and is ended."""
        try:
            group.start()
            with signals_blocked(STOP_SIGNALS):
                self._group = group
                earlier = tuple(self.received)
            for number in earlier:
                group.forward(number)
            yield group
        finally:
            self._group = None
            group.close()
