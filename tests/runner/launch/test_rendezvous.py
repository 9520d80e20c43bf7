"""Which node is the first (R6, R9)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.launch import messages, rendezvous
from runner.launch.messages import Connection
from runner.recipe import nodes
from runner.recipe.schema import Distributed
from tests.helpers import free_port


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Close the sockets that a process keeps to its end."""
    yield
    while rendezvous._LISTENING:
        rendezvous._LISTENING.popitem()[1].close()


def several(**fields: Any) -> Distributed:
    given = {"rdzv_endpoint": f"127.0.0.1:{free_port()}", **fields}
    return Distributed(kind="multi_node", device="cpu", **given)


def test_the_node_with_the_address_is_the_first() -> None:
    distributed = several()
    assert not rendezvous.is_member(distributed)
    assert not rendezvous.is_member(distributed)  # it listens already
    assert rendezvous.listener(distributed).getsockname()[0] == "127.0.0.1"
    assert rendezvous.is_member(several(rdzv_endpoint="192.0.2.1:29400"))


def test_a_second_command_on_the_same_machine_is_another_node() -> None:
    distributed = several()
    endpoint = nodes.endpoint(distributed)
    assert endpoint is not None
    with messages.listen(endpoint):
        assert rendezvous.is_member(distributed)
        with pytest.raises(ConfigError, match=r"another command listens there"):
            rendezvous.listener(distributed)
        first = several(rdzv_endpoint=str(endpoint), is_host=True)
        with pytest.raises(ConfigError, match=r"listens there, and that failed \(Address already"):
            rendezvous.is_member(first)


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
    assert rendezvous.is_member(several(**fields)) == expected


@contextlib.contextmanager
def _waiting_node() -> Iterator[list[dict[str, Any]]]:
    """Connect to a first node; at the end of the context the list has what that has said."""
    distributed = several()
    endpoint = nodes.endpoint(distributed)
    assert endpoint is not None
    assert not rendezvous.is_member(distributed)
    connection, heard = Connection(messages.connect(endpoint, 5.0, None), 60.0), list[Any]()
    connection.send("hello")

    def listen() -> None:
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            heard.extend(connection.received())
            time.sleep(0.01)
        connection.close()

    thread = threading.Thread(target=listen)
    thread.start()
    yield heard
    thread.join(70)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError.of("x=1", "no", "Give 2."), 2), (KeyboardInterrupt(), 130)]
)
def test_a_first_node_that_is_refused_ends_nodes_that_wait(error: BaseException, code: int) -> None:
    with _waiting_node() as heard, pytest.raises(type(error)), rendezvous.ending_with():
        raise error
    assert (heard[0]["kind"], heard[0]["code"]) == ("finish", code)
    assert str(error) in heard[0]["text"]


def test_a_first_node_with_nothing_to_do_ends_nodes_that_wait() -> None:
    with _waiting_node() as heard, rendezvous.ending_with() as ended:
        assert ended(0) == 0
    assert (heard[0]["kind"], heard[0]["code"]) == ("finish", 0)
