"""Messages between nodes, over real connections (R9)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from accel.machine import env
from runner.launch import messages
from runner.launch.messages import Connection, Lost
from runner.recipe.machines import Endpoint
from tests.helpers import free_port


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    endpoint = Endpoint("127.0.0.1", free_port())
    with messages.listen(endpoint) as listener:
        one = messages.connect(endpoint, 60.0, "127.0.0.1")
        other, _ = listener.accept()
        with one, other:
            yield one, other


def received(connection: Connection) -> list[dict[str, Any]]:
    """Return the next messages; `Lost` goes through."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := connection.received():
            return found
        time.sleep(0.01)
    return []


def close(*connections: Connection) -> None:
    """Close both sides at once: each waits until the other has read what it sent."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(Connection.close, connections))


def test_messages_arrive_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = Connection(ends[0], 60.0), Connection(ends[1], 60.0)
    one.send("hello", name="a", big="x" * 300_000)
    one.send("stop", signal=15)
    ends[0].shutdown(socket.SHUT_WR)
    found: list[dict[str, Any]] = []
    while len(found) < 2:
        found += received(other)
    assert [message["kind"] for message in found] == ["hello", "stop"]
    assert found[1] == {"kind": "stop", "signal": 15}
    with pytest.raises(Lost, match="its connection was closed"):
        received(other)
    close(one, other)


def test_the_kernel_probes_an_idle_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    """A cut link itself is tested in network namespaces."""
    connection = Connection(ends[0], 6.0)
    of_tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    found = [ends[0].getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp]
    assert (ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), found) == (1, [1, 1, 6000])
    ends[1].close()
    connection.close()


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"no": "kind"}\n'])
def test_a_stranger_is_no_node(ends: tuple[socket.socket, socket.socket], line: bytes) -> None:
    connection = Connection(ends[1], 60.0)
    ends[0].sendall(line)
    with pytest.raises(Lost, match="no messages of a runner's"):
        received(connection)
    ends[0].close()
    connection.close()


def test_gloo_gets_the_interface_of_an_address() -> None:
    with env.patched(GLOO_SOCKET_IFNAME=None):
        assert messages.gloo_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
        assert messages.gloo_variables("192.0.2.1") == {}
    with env.patched(GLOO_SOCKET_IFNAME="eth7"):
        assert messages.gloo_variables("127.0.0.1") == {}
