"""A node that joins: what it says, and what it does when the first node goes (R9)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import StateError
from runner.launch import member, messages
from runner.launch.messages import Connection
from runner.recipe import nodes
from runner.recipe.schema import Distributed, Recipe
from tests.helpers import free_port


class First:
    """The first node's side of one connection."""

    def __init__(self, recipe: Recipe) -> None:
        endpoint = nodes.endpoint(recipe.distributed)
        assert endpoint is not None
        self._listener = messages.listen(endpoint)
        self.code: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._follow, args=(recipe,), daemon=True)
        self.thread.start()
        self.connection = Connection(self._listener.accept()[0], 60.0)

    def _follow(self, recipe: Recipe) -> None:
        try:
            self.code = member.follow(recipe)
        except StateError as error:
            self.error = error

    def message(self) -> dict[str, Any]:
        """Return the next message."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := self.connection.received():
                return found[0]
            time.sleep(0.01)
        raise AssertionError("it says nothing")

    def close(self) -> None:
        self.connection.close()
        self._listener.close()
        self.thread.join(60)


@pytest.fixture
def recipe() -> Recipe:
    endpoint = f"127.0.0.1:{free_port()}"
    return Recipe(
        distributed=Distributed(
            kind="multi_node", nnodes=2, device="cpu", num_processes=3, rdzv_endpoint=endpoint
        )
    )


@pytest.fixture
def first(recipe: Recipe) -> Iterator[First]:
    found = First(recipe)
    yield found
    found.close()


def test_it_describes_its_command(first: First) -> None:
    hello = first.message()
    assert (hello["kind"], hello["num_processes"], hello["node_rank"]) == ("hello", 3, None)
    assert hello["recipe"]["distributed"]["kind"] == "multi_node"
    first.connection.send("finish", code=75, text="")
    first.close()
    assert first.code == 75


def test_a_run_directory_that_it_does_not_see_is_told(
    first: First, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "SEEN_SECONDS", 0.2)
    first.message()
    first.connection.send("start", folder=str(tmp_path), digest="a")
    assert first.message()["kind"] == "unseen"


def test_a_first_node_that_ends_is_lost(first: First) -> None:
    first.message()
    first.connection.send("waiting", text="joined")
    first.close()
    assert "The first node, 127.0.0.1:" in str(first.error)
    assert "is lost: its connection" in str(first.error)


def test_nobody_answers(recipe: Recipe) -> None:
    short = replace(recipe, distributed=replace(recipe.distributed, join_timeout=0.5))
    with pytest.raises(StateError, match=r"No first node answers at 127\.0\.0\.1:"):
        member.follow(short)


def test_what_listens_there_and_says_nothing_is_no_first_node(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(messages, "SEND_SECONDS", 1.0)
    short = replace(recipe, distributed=replace(recipe.distributed, join_timeout=0.2))
    endpoint = nodes.endpoint(short.distributed)
    assert endpoint is not None
    with messages.listen(endpoint):
        said = r"No first node answers at 127\.0\.0\.1:\d+: something listens there, and has said"
        with pytest.raises(StateError, match=said):
            member.follow(short)
