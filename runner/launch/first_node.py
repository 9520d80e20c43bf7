"""The first node of several: it waits for the others, and starts and ends each attempt on all.

A node that is killed or cut off ends the attempt. The next one has the nodes that are there by
then; others may join at any time, and wait for it. Free of torch at import.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError, StateError
from runner.exit_codes import FAILED
from runner.launch import attempt, staging
from runner.launch.attempt import Ended
from runner.launch.joining import Joining, Node
from runner.launch.messages import Lost, gloo_variables
from runner.launch.worker_group import (
    GRACE_SECONDS,
    MONITOR_SECONDS,
    Failure,
    Place,
    StopSignals,
    WorkerGroup,
)
from runner.recipe import nodes, processes
from runner.recipe.batch_plan import plan_batches
from runner.recipe.schema import Recipe
from runner.recipe.units import counted
from runner.runs import outcomes
from runner.runs.job import Job
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of

# How long an elastic run waits for more nodes once there are enough.
LAST_CALL_SECONDS = 10.0


class FirstNode:
    """The machines of a run over several nodes, seen from the first one.

    Attributes:
        num_processes: workers on all nodes in the last attempt.
    """

    def __init__(self, listener: socket.socket, job: Job, recipe: Recipe) -> None:
        self._job, self._recipe = job, recipe
        self._local = processes.local_count(recipe.distributed)
        self._least, self._most = nodes.counts(recipe.distributed)
        self._timeout = nodes.seconds(recipe.distributed, "node_timeout")
        self._joining = Joining(listener, job, recipe)
        self.num_processes = processes.count(recipe.distributed)

    def attempt(self, folder: Path, stops: StopSignals) -> Ended:
        """Run the job in `folder` once, on the nodes that are there."""
        chosen = self._gathered(stops)
        if chosen is None:
            return attempt.stopped_while_waiting(run_dir_of(folder), stops.received[0])
        with attempt.hosted_store() as store:
            place = self._start(chosen, folder, store.port)
            group = attempt.workers(folder, place, Path(self._job.cwd))
            try:
                with stops.running(group):
                    self._watch(group, chosen, stops)
                    for node in chosen:
                        node.connection.send("end")
            except KeyboardInterrupt:
                for node in chosen:
                    node.connection.send("end")
                raise
            self._await_ends(chosen)
        return self._concluded(folder, group, chosen)

    def finish(self, ended: Ended) -> None:
        """Tell all nodes, those that wait included, how the run ended."""
        text = "" if ended.cause is None else f"the run failed: {ended.cause.message}"
        self._joining.close(ended.code, text)

    # -- before an attempt ---------------------------------------------------------------------

    def _gathered(self, stops: StopSignals) -> list[Node] | None:
        """Wait for the other nodes of an attempt, and return them; None: a stop was requested.

        Raises:
            StateError: if too few join in time.
            ConfigError: if the recipe fits no number of nodes that are there.
        """
        wait = nodes.seconds(self._recipe.distributed, "join_timeout")
        begun, enough_since, announced = time.monotonic(), None, -1
        while not stops.received:
            others = self._joining.waiting(stops)
            total, now = 1 + len(others), time.monotonic()
            if total < self._least:
                enough_since = None
            elif enough_since is None:
                enough_since = now
            if total >= self._most or (
                enough_since is not None and now - enough_since >= LAST_CALL_SECONDS
            ):
                return self._fitting(others)
            if total != announced:
                announced = total
                print(self._waiting(total), file=sys.stderr, flush=True)
            if total < self._least and now - begun > wait:
                raise StateError(
                    f"distributed.nnodes={self._recipe.distributed.nnodes}: only "
                    f"{counted(total, 'node')} joined within {wait:.0f} s. Start the same command "
                    "on the others, or give distributed.join_timeout more."
                )
            time.sleep(MONITOR_SECONDS)
        return None

    def _waiting(self, total: int) -> str:
        wanted = counted(self._least, "node")
        more = "" if self._least == self._most else f" (up to {self._most})"
        return f"{total} of {wanted}{more} at {self._recipe.distributed.rdzv_endpoint}; waiting."

    def _fitting(self, others: Sequence[Node]) -> list[Node]:
        """Return as many nodes as the recipe's batches can be divided over; the rest waits."""
        ordered = sorted(others, key=lambda node: node.order)[: self._most - 1]
        refused: ConfigError | None = None
        for number in range(len(ordered), self._least - 2, -1):
            world = self._local + sum(node.num_processes for node in ordered[:number])
            try:
                plan_batches(self._recipe.trainer, processes.dp_size(self._recipe, world), None)
            except ConfigError as error:
                refused = refused or error
            else:
                self.num_processes = world
                return list(ordered[:number])
        assert refused is not None
        raise refused

    def _start(self, chosen: Sequence[Node], folder: Path, port: int) -> Place:
        """Order the other nodes to start their workers, and return the place of those here."""
        first_rank = self._local
        for index, node in enumerate(chosen, start=1):
            node.begin(range(first_rank, first_rank + node.num_processes))
            node.connection.send(
                "start",
                folder=str(folder),
                digest=staging.digest(folder),
                first_rank=first_rank,
                world_size=self.num_processes,
                node=index,
                num_nodes=1 + len(chosen),
                port=port,
            )
            first_rank += node.num_processes
        return Place(
            self._local,
            0,
            self.num_processes,
            0,
            1 + len(chosen),
            "localhost",
            port,
            folder.name,
            self._gloo_variables(chosen),
        )

    def _gloo_variables(self, chosen: Sequence[Node]) -> dict[str, str]:
        address = self._recipe.distributed.local_addr
        if address is None and chosen:
            address = chosen[0].connection.address
        return {} if address is None else gloo_variables(address)

    # -- during an attempt ---------------------------------------------------------------------

    def _watch(self, group: WorkerGroup, chosen: Sequence[Node], stops: StopSignals) -> None:
        """Wait for the end of all workers, or of one that has failed on any node."""
        while True:
            running = group.poll()
            self._joining.waiting(stops)  # others may come meanwhile
            for node in chosen:
                self._hear(node, stops)
            if group.failed or any(node.has_failed for node in chosen):
                return
            if not running and all(node.has_ended for node in chosen):
                return
            time.sleep(MONITOR_SECONDS)

    def _hear(self, node: Node, stops: StopSignals | None = None) -> None:
        """Take what a node says.

        Raises:
            KeyboardInterrupt: if it was interrupted.
            ConfigError: if it does not see the run directory.
        """
        if node.has_ended or node.lost:
            return
        try:
            messages = node.connection.received()
        except Lost as error:
            node.lost = str(error)
            return
        for message in messages:
            self._take(node, message, stops)

    def _take(self, node: Node, message: dict[str, Any], stops: StopSignals | None) -> None:
        kind = message["kind"]
        if kind == "ended":
            node.end(
                {int(rank): Failure(**found) for rank, found in message["failed"].items()},
                [Outcome(**found) for found in message["outcomes"]],
            )
        elif kind == "interrupted":
            raise KeyboardInterrupt(f"on {node.name}")
        elif kind == "stop" and stops is not None:
            stops.take(int(message["signal"]))
        elif kind == "unseen":
            rule = f"node {node.name} does not see the run's files there"
            remedy = "Give output_dir=<a folder that all nodes share under the same path>."
            raise ConfigError.of(str(self._job.run_dir), rule, remedy)

    def _await_ends(self, chosen: Sequence[Node]) -> None:
        """Wait until the workers of all nodes have ended, or the nodes are lost."""
        deadline = time.monotonic() + self._timeout + 2 * GRACE_SECONDS
        while time.monotonic() < deadline:
            for node in chosen:
                self._hear(node)
            if all(node.has_ended or node.lost for node in chosen):
                return
            time.sleep(MONITOR_SECONDS)
        for node in chosen:
            if not node.has_ended and not node.lost:
                node.lost = "its workers did not end"

    def _concluded(self, folder: Path, group: WorkerGroup, chosen: Sequence[Node]) -> Ended:
        failed, left = dict(group.failed), outcomes.read_outcomes(folder)
        for node in chosen:
            node.is_busy = False
            failed |= node.failed
            known = {outcome.rank for outcome in left}
            left += [outcome for outcome in node.outcomes if outcome.rank not in known]
            if node.lost:
                left.append(_loss(node))
                self._joining.drop(node)
        return attempt.conclude(folder, failed, left)


def _loss(node: Node) -> Outcome:
    first, last = node.ranks[0], node.ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    message = f"node {node.name} ({ranks}) is lost: {node.lost}"
    return Outcome(first, time.time(), FAILED, message)
