"""R6, R9: which node is the first, who is let in, who is refused, and what each is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError, StateError
from runner.launch import messages, nodes
from runner.launch.failures import Ended
from runner.launch.group import Stops
from runner.launch.messages import Connection
from runner.launch.nodes import FirstNode, Node
from runner.launch.worker import Place
from runner.recipe.machines import Endpoint
from runner.recipe.schema import Distributed, Recipe
from runner.runs.job import Job
from tests.helpers import free_port
from tests.runner.launch.test_messages import received


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Close the sockets that a process keeps to its end."""
    yield
    while nodes._LISTENING:
        nodes._LISTENING.popitem()[1].close()


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


def endpoint(recipe: Recipe) -> Endpoint:
    return Endpoint("127.0.0.1", int(str(recipe.distributed.rdzv_endpoint).rpartition(":")[2]))


def other(recipe: Recipe, **fields: Any) -> Recipe:
    """Return the recipe with other keys of `distributed`."""
    return replace(recipe, distributed=replace(recipe.distributed, **fields))


class Follower:
    """A node that joins, in a thread; `code` is that of its command."""

    def __init__(self, recipe: Recipe) -> None:
        self.code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(recipe,), daemon=True)
        self._thread.start()

    def _run(self, recipe: Recipe) -> None:
        try:
            self.code = nodes.follow(recipe, recipe)
        except StateError as error:
            self.error = error

    def ended(self) -> int | None:
        """Wait for its end, and return its code."""
        self._thread.join(60)
        return self.code


# -- which node is the first -----------------------------------------------------------------------


def several(**fields: Any) -> Distributed:
    given = {"rdzv_endpoint": f"127.0.0.1:{free_port()}", **fields}
    return Distributed(kind="multi_node", device="cpu", **given)


def test_the_node_with_the_address_is_the_first() -> None:
    distributed = several()
    assert not nodes.is_member(distributed)
    assert not nodes.is_member(distributed)  # it listens already
    assert nodes.is_member(several(rdzv_endpoint="192.0.2.1:29400"))


def test_a_second_command_on_the_same_machine_is_another_node(recipe: Recipe) -> None:
    with messages.listen(endpoint(recipe)):
        assert nodes.is_member(recipe.distributed)
        with pytest.raises(ConfigError, match=r"another command listens there"):
            nodes.FirstNode(Job(Path()), recipe)
        with pytest.raises(ConfigError, match=r"listens there, and that failed \(Address already"):
            nodes.is_member(replace(recipe.distributed, is_host=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"node_rank": 0}, False),
        ({"node_rank": 1}, True),
        ({"is_host": False}, True),
        ({"is_host": True}, False),
    ],
)
def test_a_node_may_be_told_its_place(fields: dict[str, Any], expected: bool) -> None:
    assert nodes.is_member(several(**fields)) == expected


def test_a_first_node_with_nothing_to_do_ends_nodes_that_wait(recipe: Recipe) -> None:
    assert not nodes.is_member(recipe.distributed)
    follower = Follower(recipe)
    while follower.code is None and follower.error is None:
        nodes.release_members()
        time.sleep(0.01)
    assert follower.ended() == 0


# -- the first node --------------------------------------------------------------------------------


@pytest.fixture
def first(recipe: Recipe, tmp_path: Path) -> Iterator[FirstNode]:
    found = FirstNode(Job(tmp_path), recipe)
    yield found
    found.finish(Ended(0))


def waiting(first: FirstNode, number: int, follower: Follower | None = None) -> list[Node]:
    """Return the nodes that wait, once there are so many, or a follower has ended."""
    deadline = time.monotonic() + 60
    found: list[Node] = []
    while time.monotonic() < deadline:
        found = first.waiting(Stops())
        if len(found) == number or (follower is not None and follower.code is not None):
            break
        time.sleep(0.01)
    return found


def test_nodes_wait_in_their_order_and_hear_the_end(first: FirstNode, recipe: Recipe) -> None:
    followers = [Follower(recipe), Follower(other(recipe, num_processes=3, node_rank=1))]
    found = waiting(first, 2)
    assert [(node.num_processes, node.node_rank) for node in found] == [(3, 1), (2, None)]
    first.finish(Ended(75))
    assert [follower.ended() for follower in followers] == [75, 75]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: replace(r, seed=3), "seed=3: the first node has seed=0. Give the same command"),
        (lambda r: other(r, rdzv_id="b"), "distributed.rdzv_id=b: the first node has"),
        (lambda r: other(r, node_rank=3), "distributed.node_rank=3: places of the other nodes"),
        (lambda r: other(r, max_restarts=2), "distributed.max_restarts=2: the first node has"),
        (lambda r: replace(r, run_dir="elsewhere"), "run_dir=elsewhere: the first node trains in"),
    ],
)
def test_another_command_is_refused(
    first: FirstNode,
    recipe: Recipe,
    change: Callable[[Recipe], Recipe],
    told: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    follower = Follower(change(recipe))
    assert waiting(first, 1, follower) == []
    assert follower.ended() == 2
    assert told in capfd.readouterr().err


def test_a_place_is_given_once(first: FirstNode, recipe: Recipe) -> None:
    Follower(other(recipe, node_rank=1))
    waiting(first, 1)
    second = Follower(other(recipe, node_rank=1))
    waiting(first, 2, second)
    assert second.ended() == 2


def test_a_node_that_comes_back_early_waits_for_its_place(first: FirstNode, recipe: Recipe) -> None:
    mine = other(recipe, node_rank=1)
    Follower(mine)
    (lost,) = waiting(first, 1)
    lost.ranks, lost.is_busy = range(2, 4), True
    Follower(mine)
    for _ in range(20):
        assert first.waiting(Stops()) == []
        time.sleep(0.05)
    (loss,) = lost.end()
    assert loss.message.endswith("(ranks 2 to 3) is lost: its workers did not end")
    (back,) = waiting(first, 1)
    assert back is not lost


# -- another node ----------------------------------------------------------------------------------


class First:
    """The first node's side of one connection."""

    def __init__(self, recipe: Recipe) -> None:
        with messages.listen(endpoint(recipe)) as listener:
            self.follower = Follower(recipe)
            self.connection = Connection(listener.accept()[0], 60.0)

    def message(self) -> dict[str, Any]:
        """Return the next message."""
        return received(self.connection)[0]


@pytest.fixture
def side(recipe: Recipe) -> Iterator[First]:
    found = First(recipe)
    yield found
    found.connection.close()
    found.follower.ended()


def test_a_run_directory_that_it_does_not_see_is_told(
    side: First, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SEEN_SECONDS", 0.2)
    side.message()
    side.connection.send("start", folder=str(tmp_path), place=asdict(Place(1, 2, 1, first_rank=1)))
    (ended,) = side.message()["outcomes"]
    assert (ended["rank"], ended["code"]) == (1, 2)
    assert "does not see the run's files there" in ended["message"]


def test_a_first_node_that_ends_is_lost(side: First) -> None:
    side.message()
    side.connection.send("waiting", text="joined")
    side.connection.close()
    side.follower.ended()
    assert "The first node, 127.0.0.1:" in str(side.follower.error)
    assert "is lost: its connection" in str(side.follower.error)


def test_nobody_answers(recipe: Recipe) -> None:
    with pytest.raises(StateError, match=r"No first node answers at 127\.0\.0\.1:"):
        nodes.follow(other(recipe, join_timeout=0.5), recipe)


def test_what_listens_there_and_says_nothing_is_no_first_node(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(messages, "SEND_SECONDS", 1.0)
    with messages.listen(endpoint(recipe)):
        with pytest.raises(StateError, match=r"The first node, .*, is lost: no word from it"):
            nodes.follow(other(recipe, join_timeout=0.2), recipe)
