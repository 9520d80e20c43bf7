"""Connecting to a Ray cluster, and the words for what it lacks."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.machine.errors import ConfigError, MissingPackageError
from runner.launch import ray_cluster
from runner.launch.ray_cluster import States
from runner.recipe import trust
from tests.helpers import free_port

LOST = """The actor died unexpectedly before finishing this task.
\tclass_name: ProcessHost
\tactor_id: 4ab
\tnamespace: 17
The actor died because its node has died. Node Id: 8f3
"""


class Resources:
    """A cluster's resources, without a cluster."""

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0, "memory": 1e9}

    @staticmethod
    def get_runtime_context() -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


class Node:
    """Actors of processes, without a cluster: they answer when `answers` has their number."""

    class exceptions:
        RayError = RuntimeError

    def __init__(self) -> None:
        self.answers: dict[int, tuple[str, str, int | None]] = {}
        self.asked: list[int] = []

    def wait(self, references: list[int], timeout: float) -> tuple[list[int], list[int]]:
        ready = [one for one in references if one in self.answers]
        return ready, [one for one in references if one not in ready]

    def get(self, reference: int) -> tuple[str, str, int | None]:
        if self.answers[reference][0] == "lost":
            raise RuntimeError
        return self.answers[reference]

    def actor(self, number: int) -> SimpleNamespace:
        def remote() -> int:
            self.asked.append(number)
            return number

        return SimpleNamespace(state=SimpleNamespace(remote=remote))


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def states(node: Node, clock: list[float]) -> States:
    found = States(node, 1.0)  # type: ignore[arg-type]
    for number in (0, 1):
        found.add(number, node.actor(number))  # type: ignore[arg-type]
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_states_are_told_when_all_have_answered(
    node: Node, states: States, clock: list[float]
) -> None:
    assert not states.look({0, 1})
    assert node.asked == [0, 1]
    node.answers = {0: ("T", "one", 7)}
    assert not states.look({0, 1})
    node.answers[1] = ("S", "two", None)
    assert states.look({0, 1})
    assert [states.of(0), states.of(1)] == ["T", "S"]
    assert [states.beat(0), states.beat(1)] == [7, None]
    assert states.name_of(0) == "one"
    assert not states.look({0, 1})  # they were told
    assert node.asked == [0, 1]
    clock[0] += 1.1
    assert not states.look({0, 1})
    assert node.asked == [0, 1, 0, 1]


def test_a_state_from_before_the_question_does_not_count(
    node: Node, states: States, clock: list[float]
) -> None:
    node.answers = {0: ("T", "one", 7), 1: ("T", "two", 8)}
    states.look({0, 1})
    assert states.look({0, 1})
    assert states.of(0) == "T"
    del node.answers[0]  # perhaps it has gone on
    clock[0] += 1.1
    states.look({0, 1})
    assert not states.look({0, 1})
    clock[0] += ray_cluster.ANSWER_SECONDS
    assert states.look({0, 1})
    assert [states.of(0), states.of(1)] == ["?", "T"]
    assert states.beat(0) == 7  # nothing newer was heard
    clock[0] += 1.1
    states.look({0, 1})
    assert node.asked == [0, 1, 0, 1, 1]  # the question is still there
    node.answers[0] = ("S", "one", 9)
    assert states.look({0, 1})
    assert (states.of(0), states.beat(0)) == ("S", 9)


def test_a_silent_actor_is_waited_for_once(node: Node, states: States, clock: list[float]) -> None:
    node.answers = {1: ("T", "two", 8)}
    states.look({0, 1})
    clock[0] += ray_cluster.ANSWER_SECONDS
    assert states.look({0, 1})
    for _ in range(2):
        clock[0] += 1.1
        assert not states.look({0, 1})
        assert states.look({0, 1})  # as soon as the other one has answered
        assert [states.of(0), states.of(1)] == ["?", "T"]
    node.answers[0] = ("T", "one", 7)
    states.look({0, 1})
    clock[0] += 1.1
    states.look({0, 1})
    del node.answers[0]  # it has answered since, so its next answer has its time again
    states.look({0, 1})
    clock[0] += 1.1
    states.look({0, 1})
    assert not states.look({0, 1})


def test_a_process_that_is_lost_or_ends_is_not_waited_for(
    node: Node, states: States, clock: list[float]
) -> None:
    states.look({0, 1})
    node.answers = {0: ("lost", "", None)}
    assert states.look({0})  # the other one has ended
    assert (states.of(0), states.beat(0)) == ("?", None)


def test_the_reason_is_the_line_that_says_why() -> None:
    assert ray_cluster.reason(Exception(LOST)) == (
        "The actor died because its node has died. Node Id: 8f3"
    )
    assert ray_cluster.reason(Exception("no room\n")) == "no room"
    assert ray_cluster.reason(ValueError()) == "ValueError"


def test_a_shortage_is_what_the_whole_cluster_lacks() -> None:
    short = ray_cluster.shortage(Resources, {"CPU": 4, "GPU": 2, "memory": 1})
    assert short == " The cluster has less than that: GPU 2 of 0."
    assert ray_cluster.shortage(Resources, {"CPU": 4}) == ""
    assert ray_cluster.num_gpus(Resources) == 0


def test_packages_trusted_here_are_trusted_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "mypkg")
    found = ray_cluster.environment(Resources)  # type: ignore[arg-type]
    assert found[trust.VARIABLE] == "mypkg"
    assert found[ray_cluster.ADDRESS] == "10.0.0.1:6379"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match="accel-runner"):
        with ray_cluster.connected(None, "distributed.ray.address"):
            pass


def test_no_cluster_is_a_refusal_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, note = "distributed.ray.address", tmp_path / "current"
    monkeypatch.setattr(ray_cluster, "CURRENT", note)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="none runs on this machine") as raised:
        ray_cluster.require_cluster(None, key)
    assert "`ray start --head`" in str(raised.value)
    address = f"127.0.0.1:{free_port()}"
    note.write_text(address)
    for given in (None, address):
        with pytest.raises(ConfigError, match=f"{address}: Connection refused"):
            ray_cluster.require_cluster(given, key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        ray_cluster.require_cluster(None, key)
    ray_cluster.require_cluster("local", key)
