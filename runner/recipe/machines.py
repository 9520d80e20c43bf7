"""Machines of a run: nodes and their rendezvous, a Ray cluster, a job of Slurm.

Free of torch and Ray.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from accel.config.checks import check_choice, check_minimum
from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe.units import parse_duration

KIND, RAY = "multi_node", "ray"  # of `distributed`; the latter also of `hydra/launcher`
DEFAULT_PORT = 29400
# What the command of each node says for itself; everything else is the same on all nodes.
PER_NODE = ("num_processes", "node_rank", "is_host", "local_addr", "rdzv_endpoint")
# Keys that only several nodes have, with their defaults.
_OF_NODES = {
    **{"nnodes": 1, "rdzv_endpoint": None, "rdzv_id": "", "node_rank": None},
    **{"is_host": None, "local_addr": None},
}
LOCAL = "local"
# Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Slurm sends a signal up to a minute earlier than it is asked to.
# Source: https://slurm.schedmd.com/sbatch.html#OPT_signal
SIGNAL_RESOLUTION = 60
# Options of sbatch that the script sets itself; the keys stand for them.
OWN_OPTIONS = {
    "nodes": "submit.nodes",
    "ntasks": "submit.tasks_per_node",
    "ntasks-per-node": "submit.tasks_per_node",
    "gpus-per-node": "submit.gpus_per_node",
    "cpus-per-task": "submit.cpus_per_task",
    "time": "submit.time",
    "signal": "submit.signal_delay_s",
    "requeue": "submit.requeue",
    "no-requeue": "submit.requeue",
    "array": "runner -m",
    "output": "run_dir",
    "chdir": "the working directory",
}


class Distributed(Protocol):
    """The keys of `runner.recipe.schema.Distributed` that are read here."""

    kind: Any
    max_restarts: int
    nnodes: Any
    rdzv_endpoint: str | None
    node_rank: int | None
    is_host: bool | None


@dataclass(frozen=True)
class Endpoint:
    """The address at which the first node waits for the others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_local(self) -> bool:
        """Return whether the address is one of this machine's.

        Raises:
            ConfigError: if the name of the host is not known here.
        """
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            value = f"distributed.rdzv_endpoint={self}"
            remedy = "Give the name or the address of the first node."
            raise ConfigError.of(value, f"{self.host!r} is not known here ({error})", remedy) from (
                error
            )
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)  # to the address alone: any port
                return True
        return False


def problems_of(distributed: Distributed) -> Problems:
    """Return what is wrong with the keys of nodes and restarts."""
    problems = Problems()
    if distributed.kind != KIND:
        given = [name for name, value in _OF_NODES.items() if getattr(distributed, name) != value]
        for name in given:
            problems.add(
                f"distributed.{name}={getattr(distributed, name)} with "
                f"distributed={distributed.kind}",
                "these are processes of one machine",
                "Choose distributed=multi_node.",
            )
    times = (partial(seconds, name=name) for name in ("node_timeout", "join_timeout"))
    checks: tuple[Callable[[Distributed], object], ...] = (counts, endpoint, *times)
    for check in checks:
        problems.collect(check, distributed)
    if distributed.node_rank and distributed.is_host:
        problems.add(
            f"distributed.node_rank={distributed.node_rank} with distributed.is_host=true",
            "node 0 hosts the rendezvous",
            "Leave one of the two out.",
        )
    if distributed.kind == "none" and distributed.max_restarts:
        problems.add(
            f"distributed.max_restarts={distributed.max_restarts} with distributed=none",
            "a process that computes in the command itself cannot be started again",
            "Choose distributed=multi_cpu or multi_gpu, with distributed.num_processes=1 for one.",
        )
    return problems


def counts(distributed: Distributed) -> tuple[int, int]:
    """Return the least and the greatest number of nodes; equal: no other number is accepted.

    Raises:
        ConfigError: if `nnodes` is no such number or range.
    """
    text = str(distributed.nnodes).strip()
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        rule = "it is a number of nodes, or the least and the greatest one"
        remedy = "Give distributed.nnodes=2 or distributed.nnodes=1:4."
        raise ConfigError.of(f"distributed.nnodes={text}", rule, remedy)
    return least, most


def endpoint(distributed: Distributed) -> Endpoint | None:
    """Return the address of the rendezvous; None: it is not given.

    Raises:
        ConfigError: if it is no address.
    """
    text = distributed.rdzv_endpoint
    if text is None:
        return None
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\[\]\s]+)(?::(\d+))?", str(text).strip())
    port = int(found[2] or DEFAULT_PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        rule = "it is the address of the first node, as all nodes reach it, and a port there"
        remedy = f"Give distributed.rdzv_endpoint=node0:{DEFAULT_PORT}."
        raise ConfigError.of(f"distributed.rdzv_endpoint={text}", rule, remedy)
    return Endpoint(found[1].strip("[]"), port)


def seconds(distributed: Distributed, name: str) -> float:
    """Return the time-out `name` in seconds; infinity where it is null."""
    found = parse_duration(getattr(distributed, name), f"distributed.{name}")
    return float("inf") if found is None else found


@dataclass
class RayPlacement:
    """A placement group of a Ray cluster, with a bundle for each process (distributed=ray).

    Args:
        address: host:port of the cluster's head; local: a cluster on this machine, for this run
            alone; None: RAY_ADDRESS, else the cluster that runs on this machine.
        placement: PACK (few nodes), SPREAD (many), STRICT_PACK (one) or STRICT_SPREAD (one each).
        cpus: CPUs of each process; also its intra-op threads, unless num_threads says otherwise.
        resources: custom resources of each process, by name.
        runtime_env: Ray's runtime environment of the processes.
    """

    address: str | None = None
    placement: Any = "PACK"
    cpus: float = 1.0
    resources: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        check_choice(self, "placement", PLACEMENTS, problems)
        if self.cpus < 0:
            rule = "it is a number of CPUs, 0 or more"
            problems.add(f"RayPlacement.cpus={self.cpus}", rule, "Give distributed.ray.cpus=1.")
        problems += client_address(self.address, "distributed.ray.address")
        problems.raise_if()


def client_address(address: str | None, key: str) -> list[Problem]:
    """Return the problem of an address of Ray's client, whose processes outlive the command."""
    if not (address or "").startswith("ray://"):
        return []
    rule = "the command runs on a machine of the cluster, so that its end ends the processes"
    remedy = "Give the head's host:port, or start the command with `ray job submit`."
    return [Problem(f"{key}={address}", rule, remedy)]


@dataclass
class Submit:
    """What `runner submit` asks Slurm for. It has no effect on a run that is started here.

    Args:
        partition: the partition; null: the cluster's default.
        account: the account that is charged; null: the user's default.
        qos: the quality of service.
        constraint: required features of the nodes.
        nodes: how many nodes.
        tasks_per_node: processes on each node; null: one per GPU, distributed.num_processes divided
            by nodes, or as `distributed` has it on one machine.
        gpus_per_node: GPUs of each node, one per process.
        cpus_per_task: CPU cores of each process.
        mem: memory of each node, e.g. 64G; null: the partition's default.
        time: time limit, "HH:MM:SS" or "D-HH:MM:SS"; null: the partition's.
        signal_delay_s: seconds before the limit at which the run saves its state and stops.
        requeue: whether the job is queued again after its time limit or a preemption.
        setup: lines of shell before the processes start, e.g. "module load cuda".
        extra: further options of sbatch, e.g. "--mail-type=FAIL".
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: Any = None
    signal_delay_s: int = 120
    requeue: bool = True
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task"):
            check_minimum(self, name, 1, problems)
        check_minimum(self, "signal_delay_s", 1, problems)
        seconds = problems.collect(lambda: self.seconds)
        least = self.signal_delay_s + SIGNAL_RESOLUTION
        if seconds is not None and seconds <= least:
            problems.add(
                f"submit.time={self.time} with submit.signal_delay_s={self.signal_delay_s}",
                f"the run is stopped so long before its limit, or up to {SIGNAL_RESOLUTION} s "
                "earlier: no time is left to train",
                f"Give more than {least} s, or a smaller submit.signal_delay_s.",
            )
        self._check_extra(problems)
        problems.raise_if()

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None: the partition's.

        Raises:
            ConfigError: if it has no such form.
        """
        if self.time is None:
            return None
        if not isinstance(self.time, str):
            rule = 'it is "HH:MM:SS" or "D-HH:MM:SS": a number could be minutes or seconds'
            remedy = "Give submit.time=04:00:00 for four hours."
            raise ConfigError.of(f"submit.time={self.time!r}", rule, remedy)
        found = parse_duration(self.time.replace("-", ":", 1), "submit.time")
        return None if found is None else int(found)

    def _check_extra(self, problems: Problems) -> None:
        for option in self.extra:
            name = option.removeprefix("--").partition("=")[0]
            if not re.fullmatch(r"--?[A-Za-z][^\n]*", option):
                remedy = "Give submit.extra=['--mail-type=FAIL']."
                problems.add(f"submit.extra: {option!r}", "each is one option of sbatch", remedy)
            elif option.startswith("--") and name in OWN_OPTIONS:
                rule = "the script sets that option itself"
                remedy = f"Leave it out; {OWN_OPTIONS[name]} decides."
                problems.add(f"submit.extra: {option!r}", rule, remedy)
        for line in self.setup:
            if "\n" in line:
                rule, remedy = "each is one line", "Give several."
                problems.add(f"submit.setup: {line!r}", rule, remedy)
