"""Nodes that join the first one: who is let in, who is refused, and what each is told (R9)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.launch import member, messages
from runner.launch.joining import Joining, Node
from runner.launch.worker_group import StopSignals
from runner.recipe import nodes
from runner.recipe.schema import Distributed, Recipe
from runner.runs.job import Job
from tests.helpers import free_port

Join = Callable[..., "Follower"]


class Follower:
    """A node that joins, in a thread; `code` is that of its command."""

    def __init__(self, recipe: Recipe) -> None:
        self.code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(recipe,), daemon=True)
        self._thread.start()

    def _run(self, recipe: Recipe) -> None:
        try:
            self.code = member.follow(recipe)
        except BaseException as error:
            self.error = error

    def ended(self) -> int | None:
        """Wait for its end, and return its code."""
        self._thread.join(60)
        return self.code


@pytest.fixture
def recipe() -> Recipe:
    distributed = Distributed(
        kind="multi_node",
        nnodes="1:3",
        device="cpu",
        num_processes=2,
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_id="a",
        join_timeout=60,
    )
    return Recipe(distributed=distributed)


@pytest.fixture
def first(recipe: Recipe, tmp_path: Path) -> Iterator[Joining]:
    endpoint = nodes.endpoint(recipe.distributed)
    assert endpoint is not None
    with messages.listen(endpoint) as listener:
        joining = Joining(listener, Job(tmp_path), recipe)
        yield joining
        joining.close(0, "")


def other(recipe: Recipe, **fields: Any) -> Recipe:
    """Return the recipe with other keys of `distributed`."""
    return replace(recipe, distributed=replace(recipe.distributed, **fields))


def waiting(first: Joining, number: int, follower: Follower | None = None) -> list[Node]:
    """Return the nodes that wait, once there are so many, or a follower has ended."""
    deadline = time.monotonic() + 60
    found: list[Node] = []
    while time.monotonic() < deadline:
        found = first.waiting(StopSignals())
        if len(found) == number or (follower is not None and follower.code is not None):
            break
        time.sleep(0.01)
    return found


def test_nodes_wait_and_hear_the_end(first: Joining, recipe: Recipe) -> None:
    followers = [Follower(recipe), Follower(other(recipe, num_processes=3, node_rank=1))]
    found = waiting(first, 2)
    assert sorted(node.num_processes for node in found) == [2, 3]
    assert min(found, key=lambda node: node.order).node_rank == 1
    first.close(75, "")
    assert [follower.ended() for follower in followers] == [75, 75]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: replace(r, seed=3), "seed=3: the first node has seed=0. Give the same command"),
        (lambda r: other(r, rdzv_id="b"), "the first node at this address runs the job 'a'"),
        (lambda r: other(r, node_rank=3), "distributed.node_rank=3: places of the other nodes"),
        (lambda r: other(r, max_restarts=2), "distributed.max_restarts=2: the first node has"),
        (lambda r: replace(r, run_dir="elsewhere"), "run_dir=elsewhere: the first node trains in"),
    ],
)
def test_another_command_is_refused(
    first: Joining,
    recipe: Recipe,
    change: Callable[[Recipe], Recipe],
    told: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    follower = Follower(change(recipe))
    assert waiting(first, 1, follower) == []
    assert follower.ended() == 2
    assert told in capfd.readouterr().err


def test_a_place_is_given_once(first: Joining, recipe: Recipe) -> None:
    Follower(other(recipe, node_rank=1))
    waiting(first, 1)
    second = Follower(other(recipe, node_rank=1))
    waiting(first, 2, second)
    assert second.ended() == 2


def test_a_node_that_comes_back_early_waits_for_its_place(first: Joining, recipe: Recipe) -> None:
    mine = other(recipe, node_rank=1)
    Follower(mine)
    (lost,) = waiting(first, 1)
    lost.begin(range(2, 4))
    Follower(mine)
    assert first.waiting(StopSignals()) == []
    time.sleep(1.0)
    assert first.waiting(StopSignals()) == []
    lost.is_busy = False
    first.drop(lost)
    (back,) = waiting(first, 1)
    assert back is not lost


def test_strangers_do_not_disturb(
    first: Joining, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "SEND_SECONDS", 1.0)
    endpoint = nodes.endpoint(recipe.distributed)
    assert endpoint is not None
    with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        Follower(recipe)
        assert len(waiting(first, 1)) == 1
