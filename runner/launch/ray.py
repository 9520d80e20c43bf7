"""A run, or jobs of a sweep, in a Ray cluster: each process is under an actor, where Ray has room.

Ray chooses nodes and GPUs; ranks and the store are set here, and from there on everything is as on
this machine: each process reads the frozen job, and writes how it has ended. Free of torch and Ray
at import.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from accel.machine import env, imports
from accel.machine.errors import ConfigError, Problem, StateError
from runner.exit_codes import DONE, FAILED, REFUSED
from runner.launch import failures, fork_server, group, remote_process
from runner.launch.failures import Ended
from runner.launch.fork_server import Order
from runner.launch.group import Group, Maker, Stops
from runner.launch.remote_process import Site
from runner.launch.worker import Place
from runner.recipe import machines, processes, trust
from runner.recipe.schema import Distributed
from runner.runs import numerics, outcomes
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training.stopping import HEARD_SIGNALS, handlers_restored

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

ADDRESS, VISIBLE = "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"
# Where Ray notes the cluster that was started last on this machine.
# Source: https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html
CURRENT = Path("/tmp/ray/ray_current_cluster")
CONNECT_SECONDS = 10.0
# How long an actor waits for something to report.
EVENT_SECONDS = 5.0
POLL_SECONDS = 0.2
# Until a line says what is waited for.
NOTE_SECONDS = 5.0
SHARE = "Start in a folder, with an output_dir, on a file system that all nodes share."
# Variables by which Ray marks its own workers; the processes that they start are none.
OF_WORKERS: dict[str, None] = dict.fromkeys(("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT"))


def main(sent: Mapping[str, Any]) -> None:
    """Be a process under an actor; standard input has its order, as of a fork server."""
    pickled = sys.stdin.buffer.read()
    if not os.path.isdir(sent["folder"]):
        rule = f"the node {platform.node()} has no such folder"
        print(Problem(sent["folder"], rule, SHARE), file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    fork_server.be(pickled, sent["parent"])


class Actor:
    """A process under an actor, as a handle; the actor ends with it, and gives its room back.

    Args:
        ray: the module, connected.
        actor: from `host`.
        order: what the process does; `folder` is among its arguments.
        on_lost: gets the reason where Ray has lost the process, and returns its status.
        waits: whether it may wait for room: until it has it, a signal ends it.
    """

    def __init__(
        self,
        ray: ModuleType,
        actor: ActorHandle,
        order: Order,
        *,
        on_lost: Callable[[str], int],
        waits: bool = False,
    ) -> None:
        self._ray, self._actor = ray, actor
        self._on_lost, self._waits = on_lost, waits
        self.pid = 0
        self.status: int | None = None
        sent = {"path": group.search_path(), "folder": str(order.arguments["folder"])}
        actor.start.remote(group.bootstrap(__name__), sent, pickle.dumps(order))
        self._events: ObjectRef = actor.events.remote(EVENT_SECONDS)

    def poll(self) -> int | None:
        """Show its output; return its status."""
        if self.status is None and self._ray.wait([self._events], timeout=0)[0]:
            self._take()
        return self.status

    def _take(self) -> None:
        try:
            found = self._ray.get(self._events)
        except self._ray.exceptions.RayError as error:
            self._end(self._on_lost(reason(error)))
            return
        for kind, value in found:
            if kind == remote_process.STARTED:
                self.pid = value
            elif kind == remote_process.OUTPUT:
                show(value)
            else:
                self._end(value)
        if self.status is None:
            self._events = self._actor.events.remote(EVENT_SECONDS)

    def _end(self, status: int) -> None:
        self.status = status
        self._ray.kill(self._actor)

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        if self._waits and not self.pid:
            self._end(-number)
        else:
            self._actor.send.remote(number)

    def kill(self) -> None:
        """Kill the process, if it runs; its children are killed at its end."""
        if self.status is None:
            self.send(signal.SIGKILL)


@contextlib.contextmanager
def connected(address: str | None, key: str) -> Iterator[ModuleType]:
    """Connect to a cluster in the context, which gets the module `ray`.

    Leaving the context ends everything that was started in it. Signal handlers of this process are
    as before, inside and afterwards.

    Args:
        address: host:port, "local" to start a cluster, None for the one that is there.
        key: of the address, for errors.

    Raises:
        MissingPackageError: if Ray is not installed.
        ConfigError: if there is no cluster.
    """
    ray = imports.require("ray", f"{key.removesuffix('.address')}", extra=machines.RAY)
    options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == machines.LOCAL:
        options["include_dashboard"] = False
    require_cluster(address, key)
    with handlers_restored(HEARD_SIGNALS):
        try:
            ray.init(address=address or "auto", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreached(address, key, reason(error)) from error
    ray.cloudpickle.register_pickle_by_value(remote_process)  # nodes need not have it
    try:
        yield ray
    finally:
        ray.cloudpickle.unregister_pickle_by_value(remote_process)
        ray.shutdown()


def require_cluster(address: str | None, key: str) -> None:
    """Raise a ConfigError if nobody listens at an address: Ray would ask again for minutes."""
    found = address or env.read(ADDRESS)
    if found is None and CURRENT.exists():
        found = CURRENT.read_text(encoding="utf-8").strip()
    if found is None:
        raise _unreached(address, key, f"none runs on this machine, and {ADDRESS} is not set")
    host, _, port = found.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise _unreached(address, key, f"{found}: {error.strerror or error}") from error


def _unreached(address: str | None, key: str, why: str) -> ConfigError:
    remedy = f"Start one with `ray start --head`, give the address of its head, or {key}=local."
    return ConfigError.of(
        f"{key}={address or 'null'}", f"no Ray cluster is reached ({why})", remedy
    )


def host(
    ray: ModuleType,
    *,
    cpus: float,
    gpus: float,
    resources: Mapping[str, float],
    runtime_env: Mapping[str, object],
    scheduling_strategy: object = "DEFAULT",
) -> ActorHandle:
    """Return an actor, perhaps yet to be placed, that can start a process on its node."""
    kind = ray.remote(remote_process.ProcessHost)
    return kind.options(
        num_cpus=cpus,
        num_gpus=gpus,
        resources=dict(resources),
        runtime_env=dict(runtime_env) or None,
        max_concurrency=remote_process.CONCURRENCY,
        max_restarts=0,
        scheduling_strategy=scheduling_strategy,
    ).remote()


def environment(ray: ModuleType) -> dict[str, str | None]:
    """Return variables of processes in the cluster: its address, and none of Ray's own workers.

    Packages that the person at the keyboard trusts (``--import``) are trusted there, too.
    """
    return {
        **OF_WORKERS,
        ADDRESS: ray.get_runtime_context().gcs_address,
        numerics.WAIT_POLICY: env.read(numerics.WAIT_POLICY),
        trust.VARIABLE: env.read(trust.VARIABLE),
    }


def cwd(runtime_env: Mapping[str, object]) -> str:
    """Return the working directory of processes; ".": the one that the environment brings.

    Paths in a recipe are relative to where the command was given.
    """
    return "." if "working_dir" in runtime_env else os.getcwd()


def num_gpus(ray: ModuleType) -> int:
    """Return how many GPUs the cluster has, those in use included."""
    return int(ray.cluster_resources().get("GPU", 0))


def reason(error: BaseException) -> str:
    """Return in one line why Ray has lost a process, or could not start it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace"))]
    named = [line for line in told if "node" in line.lower() or "died" in line.lower()]
    return (named[-1:] or told[-1:] or [type(error).__name__])[0]


def show(value: tuple[int, bytes]) -> None:
    """Write output of a process to this one's, past `run.log`: the process writes that itself."""
    number, content = value
    stream = sys.stdout if number == 1 else sys.stderr
    stream.flush()
    stream.buffer.write(content)
    stream.buffer.flush()


# -- a run ---------------------------------------------------------------------------------


class RayCluster:
    """All workers run in a Ray cluster; `distributed` says where, and on which device."""

    def __init__(self, distributed: Distributed, num_processes: int) -> None:
        self._distributed, self.num_processes = distributed, num_processes

    def attempt(self, folder: Path, stops: Stops) -> Ended:
        """Run the job of a session once.

        Raises:
            ConfigError: if there is no cluster, or a node does not have the run directory.
            StateError: if Ray cannot start the processes.
        """
        from runner.launch import store

        chosen, key = self._distributed.ray, "distributed.ray.address"
        with connected(chosen.address, key) as ray:
            here = cwd(chosen.runtime_env)
            # Here rather than at rank 0, it outlives the ranks, and its port is never chosen twice.
            address = ray.util.get_node_ip_address()
            hosted = store.hosted(address)
            actors = self._actors(ray, stops, [str(folder), here])
            if stops.received:
                return failures.stopped_while_waiting(run_dir_of(folder), stops.received[0])

            def lost(rank: int, why: str) -> int:
                if outcomes.is_left(folder, rank):  # the others may have failed earlier
                    return DONE
                Outcome(rank, time.time(), FAILED, f"Ray has lost it: {why}").write(folder)
                return FAILED

            def start(order: Order) -> Actor:
                rank = order.number
                return Actor(ray, actors[rank][0], order, on_lost=partial(lost, rank))

            sites, around = [site for _, site in actors], environment(ray)
            makers: dict[int, Maker] = {
                order.number: partial(start, order)
                for place in places_of(sites, address, hosted.port, around)
                for order in fork_server.workers(folder, place, here)
            }
            failed = Group(stops).run(makers, partial(outcomes.is_left, folder))
        return failures.conclude(failures.outcomes_of(folder, failed))

    def finish(self, ended: Ended) -> None:
        """Do nothing: nobody waits."""

    def _actors(
        self, ray: ModuleType, stops: Stops, folders: Sequence[str]
    ) -> list[tuple[ActorHandle, Site]]:
        """Reserve a bundle for each process; return the actors there by rank, and where they are.

        Those of one node come after each other. A stop signal ends the wait. The placement group
        ends with the connection. To remove it would wait for a head that has been killed, until Ray
        ends the command of a complete run with a failure.
        """
        chosen, number = self._distributed.ray, self.num_processes
        bundle = {"CPU": chosen.cpus, "GPU": self._gpus(ray), **chosen.resources}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        placement = ray.util.placement_group([bundle] * number, strategy=chosen.placement)
        resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        what = f"{number} processes ({resources} each, {chosen.placement})"
        _wait(ray, stops, [placement.ready()], f"room in the Ray cluster for {what}")
        strategies = ray.util.scheduling_strategies
        actors = [
            host(
                ray,
                cpus=chosen.cpus,
                gpus=bundle.get("GPU", 0),
                resources=chosen.resources,
                runtime_env=chosen.runtime_env,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=index
                ),
            )
            for index in range(number)
        ]
        found: list[Site] = _wait(ray, stops, [one.place.remote(folders) for one in actors])
        for site in found:
            for folder in site["missing"]:
                rule = f"the node {site['host']} ({site['address']}) has no such folder"
                raise ConfigError.of(folder, rule, SHARE)
        return sorted(zip(actors, found, strict=False), key=lambda one: one[1]["node"])

    def _gpus(self, ray: ModuleType) -> int:
        """Return the GPUs of each process: one, where the cluster has any."""
        kind, there = processes.device(self._distributed), num_gpus(ray)
        if kind == "cpu" or (kind is None and there == 0):
            return 0
        if there < self.num_processes:
            raise ConfigError.of(
                f"distributed.num_processes={self.num_processes}",
                f"each process has a GPU of its own, and the Ray cluster has {there}",
                "Give fewer processes, or distributed.device=cpu.",
            )
        return 1


def _wait(
    ray: ModuleType, stops: Stops, references: Sequence[ObjectRef], what: str = "its actors"
) -> list[Any]:
    """Return results; none where a stop signal ends the wait."""
    note_at = time.monotonic() + NOTE_SECONDS
    rest = list(references)
    while rest and not stops.received:
        _, rest = ray.wait(list(references), num_returns=len(references), timeout=POLL_SECONDS)
        if rest and time.monotonic() >= note_at:
            note_at = float("inf")
            print(f"Waiting for {what}.", file=sys.stderr, flush=True)
    try:
        return [] if stops.received else list(ray.get(list(references)))
    except ray.exceptions.RayError as error:
        raise StateError(f"Ray could not start the processes: {reason(error)}") from error


def places_of(
    found: Sequence[Site], address: str, port: int, around: Mapping[str, str | None]
) -> Iterator[Place]:
    """Yield the workers of each node; `found` are where they are, by rank.

    All processes of a node see its GPUs, as NCCL wants it, and each takes that of its local rank.
    """
    first, num_nodes = 0, len({site["node"] for site in found})
    for index, (_, sites) in enumerate(itertools.groupby(found, lambda site: site["node"])):
        here = list(sites)
        gpus = ",".join(gpu for site in here for gpu in site["gpus"])
        variables = {**around, VISIBLE: gpus}
        yield Place(len(here), len(found), port, address, first, index, num_nodes, variables)
        first += len(here)
