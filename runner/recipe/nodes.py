"""The nodes of a run: how many, where they rendezvous, and which of them is the first.

Free of torch.
"""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass
from typing import Any, Protocol

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe.durations import parse_duration

KIND = "multi_node"
DEFAULT_PORT = 29400
# What the command of each node says for itself; everything else is the same on all nodes.
PER_NODE = ("num_processes", "node_rank", "is_host", "local_addr", "rdzv_endpoint")
# Keys that only several nodes have, with their defaults.
_OF_NODES = {
    **{"nnodes": 1, "rdzv_endpoint": None, "rdzv_id": "", "node_rank": None},
    **{"is_host": None, "local_addr": None},
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
    for check in (_counts, _endpoint):
        try:
            check(distributed)
        except ConfigError as error:
            problems += error.problems
    for name in ("node_timeout", "join_timeout"):
        try:
            parse_duration(getattr(distributed, name), f"distributed.{name}")
        except ConfigError as error:
            problems += error.problems
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


def missing_endpoint() -> Problem:
    """Return the problem of nodes that do not know where to rendezvous."""
    return Problem(
        "distributed=multi_node",
        "the nodes rendezvous at an address of the first one, which is not given",
        f"Give distributed.rdzv_endpoint=node0:{DEFAULT_PORT}, the same on each node.",
    )


def seconds(distributed: Distributed, name: str) -> float:
    """Return the time-out `name` in seconds; infinity where it is null."""
    found = parse_duration(getattr(distributed, name), f"distributed.{name}")
    return float("inf") if found is None else found


def _counts(distributed: Distributed) -> None:
    counts(distributed)


def _endpoint(distributed: Distributed) -> None:
    endpoint(distributed)
