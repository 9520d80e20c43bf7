"""A node other than the first: it joins the first node's run, and claims no directory of its own.

Its workers read the frozen job in the run directory, which all nodes see under the same path. Free
of torch.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel.machine.errors import StateError
from runner.exit_codes import INTERRUPTED, REFUSED, STOPPED
from runner.launch import attempt, messages, staging, start_run
from runner.launch.messages import PROTOCOL, Connection, Lost
from runner.launch.worker_group import MONITOR_SECONDS, Place, StopSignals
from runner.recipe import nodes, processes, serialization
from runner.recipe.nodes import Endpoint
from runner.recipe.schema import Recipe
from runner.runs import outcomes
from runner.runs.sessions import run_dir_of

# A node that is cut off ends its workers before the first node starts others.
OF_NODE_TIMEOUT = 0.7
# How long a file that the first node has written may take to be seen through a network file system.
SEEN_SECONDS = 15.0
# How long the first node may take to answer one that has connected: meanwhile it loads PyTorch and
# the user's packages. Added to `join_timeout`.
ANSWER_SECONDS = 60.0


def follow(recipe: Recipe) -> int:
    """Join the run of the first node until it ends, and return the exit code of the command.

    Args:
        recipe: the recipe as composed here; it is compared with the first node's.

    Raises:
        ConfigError: if the recipe contradicts this machine.
        StateError: if the first node does not answer, or is lost.
    """
    distributed = recipe.distributed
    endpoint = nodes.endpoint(distributed)
    assert endpoint is not None
    number = processes.local_count(distributed)
    wait = nodes.seconds(distributed, "join_timeout")
    try:
        end = messages.connect(endpoint, wait, distributed.local_addr)
    except OSError as error:
        raise StateError(f"No first node answers at {endpoint} ({error}).") from error
    limit = OF_NODE_TIMEOUT * nodes.seconds(distributed, "node_timeout")
    connection = Connection(end, limit)
    try:
        with StopSignals().installed() as stops:
            connection.send("hello", **_description(recipe, number))
            return _Member(connection, endpoint, recipe, number, stops).run()
    except KeyboardInterrupt:
        connection.send("interrupted")
        return INTERRUPTED
    except Lost as error:
        raise StateError(f"The first node, {endpoint}, is lost: {error}.") from error
    finally:
        connection.close()


def _description(recipe: Recipe, num_processes: int) -> dict[str, object]:
    frozen = start_run.as_frozen(recipe)
    return {
        "protocol": PROTOCOL,
        "name": platform.node(),
        "job": recipe.distributed.rdzv_id,
        "node_rank": recipe.distributed.node_rank,
        "num_processes": num_processes,
        "recipe": serialization.frozen_plain(frozen),
        "resume": recipe.resume,
        "run_dir": recipe.run_dir,
    }


class _Member:
    """What this node does for the first one, message by message."""

    def __init__(
        self,
        connection: Connection,
        endpoint: Endpoint,
        recipe: Recipe,
        num_processes: int,
        stops: StopSignals,
    ) -> None:
        self._connection, self._endpoint = connection, endpoint
        self._local_addr, self._number = recipe.distributed.local_addr, num_processes
        self._stops, self._told = stops, 0
        self._patience = nodes.seconds(recipe.distributed, "join_timeout") + ANSWER_SECONDS

    def run(self) -> int:
        for message in self._messages():
            kind = message["kind"]
            if kind == "refused":
                print(message["text"], file=sys.stderr, flush=True)
                return REFUSED
            if kind == "waiting":
                print(f"{self._endpoint}: {message['text']}", flush=True)
            elif kind == "finish":
                if message["text"]:
                    print(message["text"], file=sys.stderr, flush=True)
                return int(message["code"])
            elif kind == "start":
                self._attempt(message)
        return STOPPED

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the first node says.

        Raises:
            StateError: if what listens there says nothing: it is perhaps another program.
        """
        begun, is_answered = time.monotonic(), False
        while True:
            found = self._connection.received()
            is_answered = is_answered or bool(found)
            yield from found
            self._tell_stops()
            if not is_answered and time.monotonic() - begun > self._patience:
                raise StateError(
                    f"No first node answers at {self._endpoint}: something listens there, and has "
                    f"said nothing for {self._patience:.0f} s. End it, or choose another port on "
                    "all nodes."
                )
            time.sleep(MONITOR_SECONDS)

    def _tell_stops(self) -> None:
        """Hand on the stop signals that this node has got, so that nothing is started again."""
        for number in self._stops.received[self._told :]:
            self._told += 1
            self._connection.send("stop", signal=number)

    def _attempt(self, order: dict[str, Any]) -> None:
        folder = Path(order["folder"])
        if not _is_seen(folder, str(order["digest"])):
            self._connection.send("unseen")
            return
        place = Place(
            self._number,
            order["first_rank"],
            order["world_size"],
            order["node"],
            order["num_nodes"],
            self._endpoint.host,
            order["port"],
            folder.name,
            messages.gloo_variables(self._local_addr or self._connection.address),
        )
        print(
            f"node {place.node} of {place.num_nodes}: ranks {place.ranks[0]} to {place.ranks[-1]} "
            f"of {place.world_size}, run {run_dir_of(folder)}",
            flush=True,
        )
        group = attempt.workers(folder, place, Path.cwd())
        with self._stops.running(group):
            while group.poll() and not group.failed:
                if any(message["kind"] == "end" for message in self._connection.received()):
                    break
                self._tell_stops()
                time.sleep(MONITOR_SECONDS)
        left = outcomes.read_outcomes(folder)
        self._connection.send(
            "ended",
            failed={rank: asdict(failure) for rank, failure in group.failed.items()},
            outcomes=[asdict(outcome) for outcome in left if outcome.rank in place.ranks],
        )


def _is_seen(folder: Path, digest: str) -> bool:
    """Return whether the frozen job of the first node lies in a folder, as this node sees it."""
    deadline = time.monotonic() + SEEN_SECONDS
    while staging.digest(folder) != digest:
        if time.monotonic() > deadline:
            return False
        time.sleep(MONITOR_SECONDS)
    return True
