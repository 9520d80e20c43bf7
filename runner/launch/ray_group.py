"""The workers of one run in a Ray cluster: an actor and a process for each, in a placement group.

Ray chooses nodes and GPUs; ranks and the rendezvous are set here, and from there on everything is
as under torch's elastic agent: each process reads the frozen job, and writes how it has ended.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from accel.machine.errors import ConfigError, StateError
from runner.exit_codes import DONE, FAILED
from runner.launch import attempt, bootstrap, ray_cluster, remote_process
from runner.launch.attempt import Ended
from runner.launch.ray_cluster import Event, Watch
from runner.launch.remote_process import Place
from runner.launch.worker_group import GRACE_SECONDS, Failure, StopSignals
from runner.recipe import processes
from runner.recipe.schema import Distributed
from runner.runs import outcomes
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training.stopping import HEARD_SIGNALS, STOP_SIGNALS, handlers_restored

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.2
# Until a line says what is waited for.
NOTE_SECONDS = 5.0


class _Stopped(Exception):
    """A stop signal came before any process was started."""


class RayCluster:
    """All workers run in a Ray cluster; code in `cwd`, the user's directory, can be imported.

    Args:
        distributed: says where, and on which device.
        num_processes: number of workers.
        cwd: the user's directory.
    """

    def __init__(self, distributed: Distributed, num_processes: int, cwd: Path) -> None:
        self._distributed, self.num_processes, self._cwd = distributed, num_processes, cwd

    def attempt(self, folder: Path, stops: StopSignals) -> Ended:
        """Run the job in `folder` once, and return how it ended.

        Raises:
            ConfigError: if there is no cluster, or a node does not have the run directory.
            StateError: if Ray cannot start the processes.
            KeyboardInterrupt: on Ctrl-C, when no process is left.
        """
        order = attempt.order(folder, self._cwd)
        address = self._distributed.ray.address
        with (
            ray_cluster.connected(address, "distributed.ray.address") as ray,
            _heard(stops) as signals,
        ):
            group = _Group(
                ray,
                self._distributed,
                order,
                self.num_processes,
                partial(attempt.has_outcome, folder),
                signals,
            )
            try:
                failed = group.run()
            except _Stopped:
                return attempt.stopped_while_waiting(run_dir_of(folder), signals[0])
            finally:
                group.close()
        return attempt.conclude(folder, failed, outcomes.read_outcomes(folder))

    def finish(self, ended: Ended) -> None:
        """Do nothing: nobody waits."""


@contextlib.contextmanager
def _heard(stops: StopSignals) -> Iterator[list[int]]:
    """Collect stop signals and Ctrl-C in a list: no handler may call into Ray."""
    received = list(stops.received)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number in STOP_SIGNALS:
            stops.take(number)

    with handlers_restored(HEARD_SIGNALS) as before:
        for number in STOP_SIGNALS:
            signal.signal(number, note)
        # A shell lets background jobs ignore Ctrl-C; they still do.
        if before[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, note)
        yield received


class _Group:
    def __init__(
        self,
        ray: ModuleType,
        distributed: Distributed,
        order: Mapping[str, Any],
        num_processes: int,
        finished: Callable[[int], bool],
        signals: list[int],
    ) -> None:
        self._ray, self._distributed = ray, distributed
        # Paths in a recipe are relative to where the command was given.
        cwd = ray_cluster.cwd(distributed.ray.runtime_env)
        self._order = {**order, "cwd": cwd}
        self._number, self._finished, self._signals = num_processes, finished, signals
        self._watch = Watch(ray)
        self._store: TCPStore | None = None
        self._actors: list[ActorHandle] = []  # by rank, once they are placed
        self._running: set[int] = set()
        self._passed_on = 0
        self._deadline: float | None = None  # of processes that are to end
        self._failed: dict[int, Failure] = {}

    def run(self) -> dict[int, Failure]:
        self._place()
        environments = self._assigned()
        for rank, (actor, variables) in enumerate(zip(self._actors, environments, strict=True)):
            order = {**self._order, "environment": variables}
            actor.start.remote(bootstrap.code(attempt.WORKER), order)
            self._watch.add(rank, actor)
            self._running.add(rank)
        while self._running:
            for event in self._watch.events(POLL_SECONDS):
                self._take(event)
            self._pass_signals_on()
            self._end_what_is_left()
        if signal.SIGINT in self._signals:
            raise KeyboardInterrupt
        return self._failed

    # -- before the start ------------------------------------------------------------------

    def _gpus(self) -> int:
        """Return the GPUs of each process: one, where the cluster has any."""
        kind = processes.device(self._distributed)
        there = ray_cluster.num_gpus(self._ray)
        if kind == "cpu" or (kind is None and there == 0):
            return 0
        if there < self._number:
            raise ConfigError.of(
                f"distributed.num_processes={self._number}",
                f"each process has a GPU of its own, and the Ray cluster has {there}",
                "Give fewer processes, or distributed.device=cpu.",
            )
        return 1

    def _place(self) -> None:
        """Reserve a bundle for each process, and start the actors there."""
        ray, chosen, gpus = self._ray, self._distributed.ray, self._gpus()
        bundle = {"CPU": chosen.cpus, "GPU": gpus, **chosen.resources}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        placement = ray.util.placement_group([bundle] * self._number, strategy=chosen.placement)
        wanted = {name: amount * self._number for name, amount in bundle.items()}
        resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        what = f"{self._number} processes ({resources} each, {chosen.placement})"
        self._wait([placement.ready()], f"room in the Ray cluster for {what}", wanted)
        strategies = ray.util.scheduling_strategies
        self._actors = [
            ray_cluster.host(
                ray,
                cpus=chosen.cpus,
                gpus=gpus,
                resources=chosen.resources,
                runtime_env=chosen.runtime_env,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=index
                ),
            )
            for index in range(self._number)
        ]

    def _wait(
        self, references: Sequence[ObjectRef], what: str, wanted: Mapping[str, float] | None = None
    ) -> list[Any]:
        """Return results; a signal ends the wait."""
        note_at = time.monotonic() + NOTE_SECONDS
        while True:
            ready, rest = self._ray.wait(
                list(references), num_returns=len(references), timeout=POLL_SECONDS
            )
            if signal.SIGINT in self._signals:
                raise KeyboardInterrupt
            if self._signals:
                raise _Stopped
            if not rest:
                break
            if time.monotonic() >= note_at:
                note_at = float("inf")
                short = ray_cluster.shortage(self._ray, wanted or {})
                print(f"Waiting for {what}.{short}", file=sys.stderr, flush=True)
        try:
            return list(self._ray.get(ready))
        except self._ray.exceptions.RayError as error:
            reason = ray_cluster.reason(error)
            raise StateError(f"Ray could not start the processes: {reason}") from error

    def _assigned(self) -> list[dict[str, object]]:
        """Order the actors by node, and return the variables of each rank."""
        folders = [self._order["folder"], *filter(None, [self._order["cwd"]])]
        places: list[Place] = self._wait(
            [one.place.remote(folders) for one in self._actors], "its actors"
        )
        for place in places:
            for folder in place["missing"]:
                rule = f"the node {place['host']} ({place['address']}) has no such folder"
                raise ConfigError.of(folder, rule, ray_cluster.SHARE)
        order = remote_process.in_order(places)
        self._actors = [self._actors[index] for index in order]
        places = [places[index] for index in order]
        # Here rather than at rank 0, it outlives the ranks, and its port is never chosen twice.
        address = self._ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        common = {
            **ray_cluster.environment(self._ray),
            "WORLD_SIZE": self._number,
            "MASTER_ADDR": address,
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": Path(self._order["folder"]).name,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        return [{**common, **own} for own in _ranks(places)]

    # -- while they run --------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        rank = event.key
        if event.kind == remote_process.OUTPUT:
            ray_cluster.show(event.value)
        elif event.kind == remote_process.ENDED:
            self._running.discard(rank)
            if event.value != DONE or not self._finished(rank):
                self._failed_with(rank, event.value)
        elif event.kind == ray_cluster.LOST:
            self._running.discard(rank)
            if not self._finished(rank):  # the others may have failed earlier, because of it
                found = Outcome(rank, time.time(), FAILED, f"Ray has lost it: {event.value}")
                found.write(Path(self._order["folder"]))
                self._failed_with(rank, FAILED)

    def _failed_with(self, rank: int, status: int) -> None:
        if self._deadline is None:  # else it was ended because of another
            self._failed[rank] = Failure(status, time.time())

    def _pass_signals_on(self) -> None:
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if number != signal.SIGINT:
                self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._running:
            self._actors[rank].send.remote(number)

    def _end_what_is_left(self) -> None:
        """Interrupt the processes after Ctrl-C or a failure; kill those that do not end soon."""
        now = time.monotonic()
        if self._deadline is None:
            if self._failed or signal.SIGINT in self._signals:
                self._deadline = now + GRACE_SECONDS
                self._send(signal.SIGINT)
        elif now >= self._deadline:
            for rank in self._running:
                self._actors[rank].kill.remote()
            self._deadline = now + GRACE_SECONDS

    def close(self) -> None:
        """End the actors; what still runs is killed with them.

        The placement group ends with the connection. To remove it here would wait for a head that
        has been killed, until Ray ends the command of a complete run with a failure.
        """
        for actor in self._actors:
            self._ray.kill(actor)


def _ranks(places: Sequence[Place]) -> Iterator[dict[str, object]]:
    """Yield the variables in which ranks differ; those of one node follow each other.

    All processes of a node see its GPUs, as NCCL wants it, and each takes that of its local rank.
    """
    sizes = Counter(place["node"] for place in places)
    gpus: dict[str, list[str]] = defaultdict(list)
    for place in places:
        gpus[place["node"]] += place["gpus"]
    local: Counter[str] = Counter()
    for rank, place in enumerate(places):
        node = place["node"]
        yield {
            "RANK": rank,
            "LOCAL_RANK": local[node],
            "LOCAL_WORLD_SIZE": sizes[node],
            VISIBLE: ",".join(gpus[node]),
        }
        local[node] += 1
