"""Several nodes that train one run: the first one listens, the others join it.

The first node starts and ends each attempt on all: its `Group` has its own workers and a `Node` for
each other one, whose command runs a `Group` of its workers. A node that is killed or cut off ends
the attempt. The next one has the nodes that are there by then; others may join at any time, and
wait for it. All nodes see the run directory under the same path. Free of torch at import.
"""

from __future__ import annotations

import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError, Problems, StateError
from runner.exit_codes import CLEAN, DONE, FAILED, INTERRUPTED, OF_SIGNAL, REFUSED
from runner.launch import failures, messages
from runner.launch.failures import Ended
from runner.launch.fork_server import ForkServer, server_of
from runner.launch.group import MONITOR_SECONDS, Group, Maker, Stops, stops_heard
from runner.launch.messages import Connection, Lost
from runner.launch.worker import Place
from runner.recipe import machines, processes, serialization
from runner.recipe.batch_plan import plan_batches
from runner.recipe.machines import Endpoint
from runner.recipe.schema import Distributed, Recipe
from runner.recipe.units import counted
from runner.runs import outcomes
from runner.runs.job import Job
from runner.runs.outcomes import Outcome
from runner.runs.resumable import AUTO
from runner.runs.sessions import JOB, run_dir_of

# How long an elastic run waits for more nodes once there are enough.
LAST_CALL_SECONDS = 10.0
# A node that is cut off ends its workers before the first node starts others.
OF_NODE_TIMEOUT = 0.7
# How long a file that the first node has written may take to be seen through a network file system.
SEEN_SECONDS = 15.0
# How long the first node may take to answer one that has connected: meanwhile it loads PyTorch and
# the user's packages. Added to `join_timeout`.
ANSWER_SECONDS = 60.0
# Keys that the commands of nodes need not have in common.
DIFFERENT = (
    *(("distributed", name) for name in machines.PER_NODE),
    *(("resume",), ("run_dir",)),  # compared with the run directory itself
)
# The socket of the first node, by address: bound once, so that a second command on the same machine
# finds it taken, and kept for all runs of this process.
_LISTENING: dict[Endpoint, socket.socket] = {}


# -- which node this is --------------------------------------------------------------------


def is_one_of_several(distributed: Distributed) -> bool:
    """Return whether this command is one of several nodes' that meet each other."""
    of_nodes = distributed.kind == machines.KIND and distributed.rdzv_endpoint is not None
    return of_nodes and processes.adopted() is None


def is_member(distributed: Distributed) -> bool:
    """Return whether this node joins the run of another one, the first; else it listens from now.

    Raises:
        ConfigError: if it is to be the first, and the address is taken or none of this machine's.
    """
    endpoint = machines.endpoint(distributed)
    if endpoint is None or not is_one_of_several(distributed) or endpoint in _LISTENING:
        return False
    first = distributed.is_host
    if first is None and distributed.node_rank is not None:
        first = distributed.node_rank == 0
    if first is False or (first is None and not endpoint.is_local()):
        return True
    try:
        _LISTENING[endpoint] = messages.listen(endpoint)
    except OSError as error:
        if first is None:
            return True  # the first node, on the same machine, has taken it
        rule = f"the first node listens there, and that failed ({error.strerror or error})"
        remedy = "End what listens there, or choose another port on all nodes."
        raise ConfigError.of(f"distributed.rdzv_endpoint={endpoint}", rule, remedy) from error
    return False


def release_members() -> None:
    """Tell the nodes that have come that nothing is left to do."""
    for listener in _LISTENING.values():
        for connection in messages.accepted(listener, ANSWER_SECONDS):
            connection.send("finish", code=DONE, text="")
            connection.close()


# -- the first node ------------------------------------------------------------------------


class Node:
    """Another node that has joined; as a handle in an attempt, its workers.

    Attributes:
        connection: the connection to its command.
        name: its host name.
        num_processes: workers that it starts.
        node_rank: the place that its command gives it; None: the order of joining.
        ranks: of its workers in the present attempt, or the last one; empty: it has not taken part.
        is_busy: whether it takes part in the present attempt.
        lost: why it counts as lost; empty: it does not.
        outcomes: how its workers have ended.
    """

    def __init__(self, connection: Connection, hello: Mapping[str, Any], stops: Stops) -> None:
        self.connection, self._stops = connection, stops
        self.name, self.num_processes = str(hello["name"]), int(hello["num_processes"])
        self.node_rank: int | None = hello["node_rank"]
        self.ranks, self.is_busy, self.lost = range(0), False, ""
        self.outcomes: list[Outcome] = []
        self.pid = 0
        self._status: int | None = None

    def start(self, place: Place, folder: Path) -> Node:
        """Order it to start its workers for the job of a session; return the handle."""
        self.ranks, self.is_busy, self._status, self.outcomes = place.ranks, True, None, []
        self.connection.send("start", folder=str(folder), place=asdict(place))
        return self

    def poll(self) -> int | None:
        """Take what it says; return 0 or 1 once its workers have ended, or it is lost.

        Raises:
            KeyboardInterrupt: if it was interrupted, after it had taken part.
        """
        try:
            for message in self.connection.received():
                self._take(message["kind"], message)
        except Lost as error:
            self.lost = str(error)
        return FAILED if self.lost else self._status

    def _take(self, kind: str, message: Mapping[str, Any]) -> None:
        if kind == "ended":
            self.outcomes = [Outcome(**found) for found in message["outcomes"]]
            self._status = DONE if all(one.code in CLEAN for one in self.outcomes) else FAILED
        elif kind == "stop":
            number = int(message["signal"])
            if not self.ranks:
                self.connection.send("finish", code=OF_SIGNAL + number, text="")
                self.lost = "it has left"
            elif number == signal.SIGINT:
                raise KeyboardInterrupt(f"on {self.name}")
            else:
                self._stops.take(number)

    def send(self, number: int) -> None:
        """End its workers with Ctrl-C; ranks agree on a stop, so one node's signal is enough."""
        if number == signal.SIGINT:
            self.connection.send("end")

    def kill(self) -> None:
        """Leave that to its command, which ends them when it is told so, or is cut off."""

    def end(self) -> list[Outcome]:
        """Return how its workers ended at the end of an attempt; of a lost node, its loss."""
        if self.is_busy and self._status is None:
            self.lost = self.lost or "its workers did not end"
        self.is_busy = False
        if not self.lost:
            return self.outcomes
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        message = f"node {self.name} ({ranks}) is lost: {self.lost}"
        return [*self.outcomes, Outcome(first, time.time(), FAILED, message)]


class FirstNode:
    """The machines of a run over several nodes, seen from the first one.

    It keeps nodes that have joined, and connections that are not admitted yet. The latter have not
    said who they are, or come back before the attempt that they took part in has ended.

    Attributes:
        num_processes: workers on all nodes in the last attempt.
    """

    def __init__(self, job: Job, recipe: Recipe) -> None:
        endpoint = machines.endpoint(recipe.distributed)
        assert endpoint is not None
        if is_member(recipe.distributed):
            rule = "another command listens there: this would be a second run"
            remedy = "Choose another port on all nodes."
            raise ConfigError.of(f"distributed.rdzv_endpoint={endpoint}", rule, remedy)
        self._job, self._recipe, self._listener = job, recipe, _LISTENING[endpoint]
        self._local = processes.local_count(recipe.distributed)
        self._least, self._most = machines.counts(recipe.distributed)
        self._guests: list[tuple[Connection, dict[str, Any]]] = []
        self._nodes: list[Node] = []
        self.num_processes = processes.count(recipe.distributed)

    def attempt(self, folder: Path, stops: Stops) -> Ended:
        """Run the job of a session once, on the nodes that are there."""
        from runner.launch import store

        chosen = self._gathered(stops)
        if chosen is None:
            return failures.stopped_while_waiting(run_dir_of(folder), stops.received[0])
        hosted = store.hosted()
        with server_of(folder) as server:
            workers, others = self._makers(server, chosen, folder, hosted.port)
            failed = Group(stops).run(
                workers,
                lambda rank: rank in others or outcomes.is_left(folder, rank),
                meanwhile=partial(self.admit, stops),
            )
        here = {rank: failure for rank, failure in failed.items() if rank not in others}
        found = failures.outcomes_of(folder, here)
        return failures.conclude([*found, *(one for node in others.values() for one in node.end())])

    def finish(self, ended: Ended) -> None:
        """Tell all nodes, those that wait included, how the run ended."""
        self.admit(Stops())
        text = "" if ended.cause is None else f"the run failed: {ended.cause.message}"
        for connection in [*(n.connection for n in self._nodes), *(g[0] for g in self._guests)]:
            connection.send("finish", code=ended.code, text=text)
            connection.close()
        self._nodes, self._guests = [], []

    def _gathered(self, stops: Stops) -> list[Node] | None:
        """Wait for the other nodes of an attempt, and return them; None: a stop was requested.

        Raises:
            StateError: if too few join in time.
            ConfigError: if the recipe fits no number of nodes that are there.
        """
        wait = machines.seconds(self._recipe.distributed, "join_timeout")
        more = "" if self._least == self._most else f" (up to {self._most})"
        begun, enough_since, announced = time.monotonic(), float("inf"), 0
        while not stops.received:
            others = self.waiting(stops)
            total, now = 1 + len(others), time.monotonic()
            enough_since = min(enough_since, now) if total >= self._least else float("inf")
            if total >= self._most or now - enough_since >= LAST_CALL_SECONDS:
                return self._fitting(others)
            if total != announced:
                announced = total
                where = self._recipe.distributed.rdzv_endpoint
                told = f"{total} of {counted(self._least, 'node')}{more} at {where}; waiting."
                print(told, file=sys.stderr, flush=True)
            if total < self._least and now - begun > wait:
                raise StateError(
                    f"distributed.nnodes={self._recipe.distributed.nnodes}: only "
                    f"{counted(total, 'node')} joined within {wait:.0f} s. Start the same command "
                    "on the others, or give distributed.join_timeout more."
                )
            time.sleep(MONITOR_SECONDS)
        return None

    def _fitting(self, others: Sequence[Node]) -> list[Node]:
        """Return as many nodes as the recipe's batches can be divided over; the rest waits."""
        refused: ConfigError | None = None
        for number in range(min(len(others), self._most - 1), self._least - 2, -1):
            world = self._local + sum(node.num_processes for node in others[:number])
            try:
                plan_batches(self._recipe.trainer, processes.dp_size(self._recipe, world), None)
            except ConfigError as error:
                refused = refused or error
            else:
                self.num_processes = world
                return list(others[:number])
        assert refused is not None
        raise refused

    def _makers(
        self, server: ForkServer, chosen: Sequence[Node], folder: Path, port: int
    ) -> tuple[dict[int, Maker], dict[int, Node]]:
        """Return what starts the workers of all nodes, and the other nodes by their first ranks."""
        address = self._recipe.distributed.local_addr
        if address is None and chosen:
            address = chosen[0].connection.address
        variables = {} if address is None else messages.gloo_variables(address)
        world, number = self.num_processes, 1 + len(chosen)
        here = Place(self._local, world, port, num_nodes=number, variables=variables)
        makers = server.makers(folder, here, Path(self._job.cwd))
        others: dict[int, Node] = {}
        first = self._local
        for index, node in enumerate(chosen, start=1):
            place = Place(
                node.num_processes, world, port, first_rank=first, node=index, num_nodes=number
            )
            makers[first] = partial(node.start, place, folder)
            others[first] = node
            first += node.num_processes
        return makers, others

    def waiting(self, stops: Stops) -> list[Node]:
        """Return the nodes that wait for an attempt, in their order; new ones are among them."""
        self.admit(stops)
        found = [node for node in self._nodes if not node.is_busy]
        last = float("inf")
        return sorted(found, key=lambda one: last if one.node_rank is None else one.node_rank)

    def admit(self, stops: Stops) -> None:
        """Let nodes join that have come, and forget those that wait and have left."""
        for node in [node for node in self._nodes if not node.is_busy]:
            node.poll()
            if node.lost:
                self._nodes.remove(node)
                node.connection.close()
        timeout = machines.seconds(self._recipe.distributed, "node_timeout")
        new = messages.accepted(self._listener, timeout)
        guests, self._guests = [*self._guests, *((connection, {}) for connection in new)], []
        for connection, known in guests:
            try:
                hello = known or next(iter(connection.received()), {})
            except Lost:
                connection.close()
                continue
            if not hello or any(one.is_busy for one in self._with_rank(hello.get("node_rank"))):
                self._guests.append((connection, hello))
            elif hello["kind"] == "hello":
                self._admit(Node(connection, hello, stops), hello)
            else:
                connection.close()

    def _with_rank(self, rank: int | None) -> list[Node]:
        """Return the nodes to which their command gives a place."""
        return [node for node in self._nodes if rank is not None and node.node_rank == rank]

    def _admit(self, node: Node, hello: Mapping[str, Any]) -> None:
        if problems := self._problems(hello):
            node.connection.send("finish", code=REFUSED, text=str(ConfigError(*problems)))
            node.connection.close()
            return
        self._nodes.append(node)
        node.connection.send("waiting")

    def _problems(self, hello: Mapping[str, Any]) -> Problems:
        """Return why a node cannot take part: its command is another one than that of the first."""
        problems, same = Problems(), "Give the same command on each node."
        rank, most = hello["node_rank"], self._most
        if rank is not None and not 1 <= rank < most:
            rule = f"places of the other nodes are 1 to {most - 1}; the first is 0"
            problems.add(f"distributed.node_rank={rank}", rule, "Leave it out, or correct it.")
        if self._with_rank(rank):
            rule = "another node has that place"
            problems.add(f"distributed.node_rank={rank}", rule, "Give each node its own.")
        plain = serialization.frozen_plain(self._recipe)
        for key, ours, theirs in serialization.differences(plain, hello["recipe"], DIFFERENT):
            problems.add(f"{key}={theirs}", f"the first node has {key}={ours}", same)
        run_dir = str(self._job.run_dir)
        for name in ("resume", "run_dir"):
            given = hello[name]
            if given not in (None, AUTO) and serialization.absolute(given, ".") != run_dir:
                problems.add(f"{name}={given}", f"the first node trains in {run_dir}", same)
        return problems


# -- another node --------------------------------------------------------------------------


def follow(recipe: Recipe, frozen: Recipe) -> int:
    """Join the run of the first node until it ends, and return the exit code of the command.

    Args:
        recipe: the recipe as composed here.
        frozen: the recipe as the first node freezes it, with which it is compared.

    Raises:
        ConfigError: if the recipe contradicts this machine.
        StateError: if the first node does not answer, or is lost.
    """
    distributed = recipe.distributed
    endpoint = machines.endpoint(distributed)
    assert endpoint is not None
    wait = machines.seconds(distributed, "join_timeout")
    try:
        end = messages.connect(endpoint, wait, distributed.local_addr)
    except OSError as error:
        raise StateError(f"No first node answers at {endpoint} ({error}).") from error
    connection = Connection(end, OF_NODE_TIMEOUT * machines.seconds(distributed, "node_timeout"))
    try:
        with stops_heard() as stops:
            connection.send(
                "hello",
                name=platform.node(),
                node_rank=distributed.node_rank,
                num_processes=processes.local_count(distributed),
                recipe=serialization.frozen_plain(frozen),
                resume=recipe.resume,
                run_dir=recipe.run_dir,
            )
            member = _Member(connection, endpoint, distributed.local_addr, stops)
            return member.run(wait + ANSWER_SECONDS)
    except KeyboardInterrupt:
        connection.send("stop", signal=signal.SIGINT)
        return INTERRUPTED
    except Lost as error:
        raise StateError(f"The first node, {endpoint}, is lost: {error}.") from error
    finally:
        connection.close()


class _Member:
    """What this node does for the first one, message by message."""

    def __init__(
        self, connection: Connection, endpoint: Endpoint, local_addr: str | None, stops: Stops
    ) -> None:
        self._connection, self._endpoint, self._local_addr = connection, endpoint, local_addr
        self._stops, self._told = stops, 0

    def run(self, patience: float) -> int:
        """Do what the first node says until the end, and return the exit code of the command.

        Raises:
            Lost: if the first node ends, or has not said a word within `patience` seconds.
        """
        deadline = time.monotonic() + patience
        while True:
            for message in self._connection.received():
                deadline = float("inf")
                if message["kind"] == "waiting":
                    print(f"{self._endpoint}: joined; waiting for an attempt to begin", flush=True)
                elif message["kind"] == "finish":
                    if message["text"]:
                        print(message["text"], file=sys.stderr, flush=True)
                    return int(message["code"])
                elif message["kind"] == "start":
                    self._attempt(Path(message["folder"]), Place(**message["place"]))
            if time.monotonic() > deadline:
                raise Lost(f"no word from it for {patience:.0f} s")
            self._tell_stops()
            time.sleep(MONITOR_SECONDS)

    def _tell_stops(self) -> None:
        """Hand on the stop signals that this node has got, so that nothing is started again."""
        for number in self._stops.received[self._told :]:
            self._told += 1
            self._connection.send("stop", signal=number)

    def _attempt(self, folder: Path, place: Place) -> None:
        run_dir = run_dir_of(folder)
        variables = messages.gloo_variables(self._local_addr or self._connection.address)
        place = replace(place, address=self._endpoint.host, variables=variables)
        first, last = place.ranks[0], place.ranks[-1]
        if _is_seen(folder):
            where = f"node {place.node} of {place.num_nodes}"
            print(f"{where}: ranks {first} to {last} of {place.world_size}, {run_dir}", flush=True)
            with server_of(folder) as server:
                failed = Group(self._stops).run(
                    server.makers(folder, place, Path.cwd()),
                    partial(outcomes.is_left, folder),
                    meanwhile=self._is_over,
                )
            found = failures.outcomes_of(folder, failed)
        else:
            rule = f"node {platform.node()} does not see the run's files there"
            remedy = "Give output_dir=<a folder that all nodes share under the same path>."
            unseen = ConfigError.of(str(run_dir), rule, remedy)
            found = [Outcome(first, time.time(), REFUSED, str(unseen))]
        self._connection.send("ended", outcomes=[asdict(outcome) for outcome in found])

    def _is_over(self) -> bool:
        """Return whether the first node ends the attempt."""
        self._tell_stops()
        return any(message["kind"] == "end" for message in self._connection.received())


def _is_seen(folder: Path) -> bool:
    """Return whether this node sees the frozen job of the first node."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not (folder / JOB).is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(MONITOR_SECONDS)
    return True
