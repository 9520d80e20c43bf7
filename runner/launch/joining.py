"""The other nodes of a run, as they join the first one. Free of torch."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from accel.machine.errors import ConfigError, Problems
from runner.exit_codes import OF_SIGNAL
from runner.launch.messages import PROTOCOL, Connection, Lost
from runner.launch.worker_group import Failure, StopSignals
from runner.recipe import nodes, resumed_recipe, serialization
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from runner.runs.outcomes import Outcome
from runner.runs.resumable import AUTO

# A connection that has not said who it is by then is no node's.
HELLO_SECONDS = 30.0
# Keys that the commands of nodes need not have in common.
DIFFERENT = (
    *(("distributed", name) for name in nodes.PER_NODE),
    *(("resume",), ("run_dir",)),  # compared with the run directory itself
)


class Node:
    """Another node that has joined, and how its part of an attempt ended.

    Attributes:
        connection: the connection to its command.
        name: its host name, with its address.
        num_processes: workers that it starts.
        node_rank: the place that its command gives it; None: the order of joining.
        order: its place among the nodes.
        ranks: of its workers in the present attempt.
        has_ended: whether its workers have ended.
        failed: how the ranks ended that failed.
        outcomes: what its workers have left.
        lost: why it counts as lost; empty: it does not.
        is_busy: whether it takes part in the present attempt.
        has_run: whether it has taken part in any.
    """

    def __init__(self, connection: Connection, hello: Mapping[str, Any], number: int) -> None:
        self.connection = connection
        self.name = f"{hello['name']} ({connection.peer})"
        self.num_processes = int(hello["num_processes"])
        self.node_rank: int | None = hello["node_rank"]
        rank = float("inf") if self.node_rank is None else self.node_rank
        self.order = (rank, number)
        self.begin(range(0))
        self.is_busy = self.has_run = False

    def begin(self, ranks: range) -> None:
        """Take part in a new attempt with the ranks `ranks`."""
        self.ranks, self.has_ended, self.lost = ranks, False, ""
        self.is_busy = self.has_run = True
        self.failed: Mapping[int, Failure] = {}
        self.outcomes: Sequence[Outcome] = ()

    def end(self, failed: Mapping[int, Failure], left: Sequence[Outcome]) -> None:
        """Note the end of its workers."""
        self.has_ended, self.failed, self.outcomes = True, failed, left

    @property
    def has_failed(self) -> bool:
        """Whether the attempt cannot go on because of this node."""
        return bool(self.failed or self.lost)


class Joining:
    """Nodes that have joined, and connections that have not yet said who they are."""

    def __init__(self, listener: socket.socket, job: Job, recipe: Recipe) -> None:
        self._listener, self._job, self._recipe = listener, job, recipe
        self._plain = serialization.frozen_plain(recipe)
        self._resumes = job.resume_from is not None  # not by a restart of its own
        self._timeout = nodes.seconds(recipe.distributed, "node_timeout")
        self._strangers: list[tuple[Connection, float]] = []
        # Also nodes that come back before the attempt that they took part in has ended.
        self._early: list[tuple[Connection, Mapping[str, Any]]] = []
        self._nodes: list[Node] = []
        self._count = 0

    def waiting(self, stops: StopSignals) -> list[Node]:
        """Return the nodes that wait for an attempt; those that have just come are among them.

        A stop signal that one of them has got is taken, if it took part in an attempt; another one
        just leaves.

        Raises:
            KeyboardInterrupt: if one that took part was interrupted.
        """
        self._accept()
        for node in [node for node in self._nodes if not node.is_busy]:
            try:
                for message in node.connection.received():
                    self._hear(node, message["kind"], message, stops)
            except Lost:
                self.drop(node)
        return [node for node in self._nodes if not node.is_busy]

    def drop(self, node: Node) -> None:
        """Forget a node that is lost."""
        if node in self._nodes:
            self._nodes.remove(node)
            node.connection.close()

    def close(self, code: int, text: str) -> None:
        """Tell all nodes how the run ended, and close the connections."""
        self._accept()
        for connection in [node.connection for node in self._nodes]:
            connection.send("finish", code=code, text=text)
        for connection, _ in [*self._strangers, *self._early]:
            connection.send("finish", code=code, text=text)
            connection.close()
        for node in self._nodes:
            node.connection.close()
        self._nodes, self._strangers, self._early = [], [], []

    def _hear(self, node: Node, kind: str, message: Mapping[str, Any], stops: StopSignals) -> None:
        if kind not in ("stop", "interrupted"):
            return
        if node.has_run and kind == "interrupted":
            raise KeyboardInterrupt(f"on {node.name}")
        if node.has_run:
            stops.take(int(message["signal"]))
        else:
            node.connection.send("finish", code=OF_SIGNAL + int(message["signal"]), text="")
            self.drop(node)

    def _accept(self) -> None:
        while select.select([self._listener], [], [], 0.0)[0]:
            end, _ = self._listener.accept()
            self._strangers.append((Connection(end, self._timeout), time.monotonic()))
        for connection, since in list(self._strangers):
            try:
                found = connection.received()
            except Lost:
                found = None
            if found or found is None or time.monotonic() - since > HELLO_SECONDS:
                self._strangers.remove((connection, since))
                self._early.append((connection, found[0] if found else {}))
        for connection, hello in list(self._early):
            if not any(node.is_busy for node in self._with_rank(hello.get("node_rank"))):
                self._early.remove((connection, hello))
                self._admit(connection, hello)

    def _with_rank(self, rank: int | None) -> list[Node]:
        """Return the nodes to which their command gives a place."""
        return [node for node in self._nodes if rank is not None and node.node_rank == rank]

    def _admit(self, connection: Connection, hello: Mapping[str, Any]) -> None:
        """Add the node that says `hello`, or refuse it; close a connection that is no node's."""
        if hello.get("kind") != "hello":
            connection.close()
            return
        problems = self._problems(hello)
        if problems:
            connection.send("refused", text=str(ConfigError(*problems)))
            connection.close()
            return
        self._count += 1
        self._nodes.append(Node(connection, hello, self._count))
        connection.send("waiting", text="joined; waiting for an attempt to begin")

    def _problems(self, hello: Mapping[str, Any]) -> Problems:
        """Return why a node cannot take part: its command is another one than that of the first."""
        problems = Problems()
        if hello["protocol"] != PROTOCOL:
            rule = f"the first node has protocol {PROTOCOL}"
            problems.add(f"protocol {hello['protocol']}", rule, "Install the same runner on both.")
            return problems
        job, rank = self._recipe.distributed.rdzv_id, hello["node_rank"]
        if hello["job"] != job:
            rule = f"the first node at this address runs the job {job!r}"
            problems.add(
                f"distributed.rdzv_id={hello['job']!r}", rule, "Give each job a port of its own."
            )
            return problems
        most = nodes.counts(self._recipe.distributed)[1]
        if rank is not None and not 1 <= rank < most:
            rule = f"places of the other nodes are 1 to {most - 1}; the first is 0"
            problems.add(f"distributed.node_rank={rank}", rule, "Leave it out, or correct it.")
        if self._with_rank(rank):
            rule = "another node has that place"
            problems.add(f"distributed.node_rank={rank}", rule, "Give each node its own.")
        for key, ours, theirs in resumed_recipe.differences(
            self._plain, hello["recipe"], DIFFERENT
        ):
            rule = f"the first node has {key}={ours}"
            problems.add(f"{key}={theirs}", rule, "Give the same command on each node.")
        problems += self._problems_of_place(hello)
        return problems

    def _problems_of_place(self, hello: Mapping[str, Any]) -> Problems:
        """Return the problems of a command that names another run directory."""
        run_dir, problems = str(self._job.run_dir), Problems()
        remedy = "Give the same command on each node."
        resume, chosen = hello["resume"], hello["run_dir"]
        if resume not in (None, AUTO, run_dir):
            problems.add(f"resume={resume}", f"the first node trains in {run_dir}", remedy)
        if resume is None and self._resumes:
            problems.add("no resume=", f"the first node resumes {run_dir}", remedy)
        if chosen is not None and resumed_recipe.absolute(chosen, ".") != run_dir:
            problems.add(f"run_dir={chosen}", f"the first node trains in {run_dir}", remedy)
        return problems
