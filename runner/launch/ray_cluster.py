"""Connection to a Ray cluster, and the processes that this command has there. Free of torch.

Source: https://docs.ray.io/en/latest/ray-core/api/index.html
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.machine import env, imports
from accel.machine.errors import ConfigError
from runner.launch import remote_process
from runner.recipe import nodes, trust
from runner.runs import numerics
from runner.training.stopping import HEARD_SIGNALS, handlers_restored

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

ADDRESS = "RAY_ADDRESS"
# Where Ray notes the cluster that was started last on this machine.
# Source: https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html
CURRENT = Path("/tmp/ray/ray_current_cluster")
CONNECT_SECONDS = 10.0
# How long an actor waits for something to report.
POLL_SECONDS = 5.0
LOST = "lost"
SHARE = "Start in a folder, with an output_dir, on a file system that all nodes share."
# Variables by which Ray marks its own workers; the processes that they start are none.
OF_WORKERS: dict[str, None] = dict.fromkeys(("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT"))


class Event(NamedTuple):
    """What has happened to a process: `remote_process`'s kinds, or LOST with Ray's reason."""

    key: int
    kind: str
    value: Any


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
    ray = imports.require("ray", f"{key.removesuffix('.address')}", extra=nodes.RAY)
    options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == nodes.LOCAL:
        options["include_dashboard"] = False
    require_cluster(address, key)
    with handlers_restored(HEARD_SIGNALS):
        try:
            ray.init(address=address or "auto", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreached(address, key, _first_line(error)) from error
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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


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
    """Return the working directory of processes; empty: the one that the environment brings."""
    return "" if "working_dir" in runtime_env else os.getcwd()


def num_gpus(ray: ModuleType) -> int:
    """Return how many GPUs the cluster has, those in use included."""
    return int(ray.cluster_resources().get("GPU", 0))


class Watch:
    """Waits for events of processes under their actors, by the caller's numbers."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._waiting: dict[ObjectRef, tuple[int, ActorHandle]] = {}

    def add(self, key: int, actor: ActorHandle) -> None:
        """Watch the process of an actor until its end."""
        self._waiting[actor.events.remote(POLL_SECONDS)] = key, actor

    def events(self, seconds: float) -> list[Event]:
        """Return what has happened, after at most so many seconds."""
        references = list(self._waiting)
        if not references:
            return []
        ready, rest = self._ray.wait(references, num_returns=1, timeout=seconds)
        if ready and rest:
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        return [event for reference in ready for event in self._of(reference)]

    def _of(self, reference: ObjectRef) -> list[Event]:
        key, actor = self._waiting.pop(reference)
        try:
            found = [Event(key, *one) for one in self._ray.get(reference)]
        except self._ray.exceptions.RayError as error:
            return [Event(key, LOST, reason(error))]
        if not any(event.kind == remote_process.ENDED for event in found):
            self.add(key, actor)
        return found


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


def shortage(ray: ModuleType, wanted: Mapping[str, float]) -> str:
    """Return what the cluster has too little of for a request; empty: others use it."""
    there = ray.cluster_resources()
    short = [
        f"{name} {amount:g} of {there.get(name, 0):g}"
        for name, amount in wanted.items()
        if amount > there.get(name, 0)
    ]
    return f" The cluster has less than that: {', '.join(short)}." if short else ""
