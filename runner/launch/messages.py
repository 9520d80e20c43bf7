"""Messages between the commands of several nodes: JSON lines over TCP.

The command of the first node listens; each other node's connects, and stays connected to its end.
So a command that is killed is noticed at once. A link that is cut is noticed by the kernel: it
probes an idle connection, and ends it after the time-out, whatever the processes do. Free of torch.

Source: https://man7.org/linux/man-pages/man7/tcp.7.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import socket
import struct
import time
from typing import Any

from accel.machine import env
from runner.recipe.machines import Endpoint
from runner.recipe.processes import INTERFACE

PROBES_PER_TIMEOUT = 6
SEND_SECONDS = 10.0
RETRY_SECONDS = 0.2
_SIOCGIFADDR = 0x8915


class Lost(Exception):
    """The other side of a connection is gone; the message says how that was noticed."""


class Connection:
    """One side of a connection between two nodes.

    Args:
        end: a connected socket, which is closed with this.
        timeout: seconds without a sign of life after which the other side counts as lost.
    """

    def __init__(self, end: socket.socket, timeout: float) -> None:
        self._end, self._rest, self._failure = end, b"", ""
        end.settimeout(SEND_SECONDS)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause = max(1, int(timeout / PROBES_PER_TIMEOUT))
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, pause),
            (socket.TCP_KEEPINTVL, pause),
            (socket.TCP_USER_TIMEOUT, int(1000 * timeout)),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def address(self) -> str:
        """This side's address, as the other side reaches it."""
        return str(self._end.getsockname()[0]).removeprefix("::ffff:")

    def send(self, kind: str, **content: object) -> None:
        """Send a message; a failure is raised by `received`."""
        try:
            self._end.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")
        except OSError as error:
            self._failure = self._failure or f"a message could not be sent ({error})"

    def received(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call.

        Raises:
            Lost: if the other side has ended, or has given no sign of life for too long.
        """
        found: list[dict[str, Any]] = []
        ended = self._failure
        while select.select([self._end], [], [], 0.0)[0]:
            try:
                data = self._end.recv(1 << 16)
            except OSError as error:
                ended = f"its connection broke ({error.strerror or error})"
                break
            if not data:
                ended = "its connection was closed"
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [_message(line) for line in lines]
        if ended and not found:  # else the next call raises it
            raise Lost(ended)
        return found

    def close(self) -> None:
        """Close the connection when what was sent has arrived, or soon."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
            self._end.settimeout(SEND_SECONDS / 2)
            while self._end.recv(1 << 16):
                pass
        self._end.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
        return {**found, "kind": str(found["kind"])}
    except (ValueError, KeyError, TypeError) as error:
        raise Lost("it sends no messages of a runner's") from error


def listen(endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens at the port of an address of this machine.

    It listens at every address, unless that one is the loopback's: the name of a machine is often
    known to itself by another address than to others.

    Raises:
        OSError: if it is taken.
    """
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    if all(one[4][0] in ("127.0.0.1", "::1") for one in found):
        return socket.create_server(address[:2], family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", endpoint.port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", endpoint.port))


def accepted(listener: socket.socket, timeout: float) -> list[Connection]:
    """Return the connections that have come since the last call."""
    found = []
    while select.select([listener], [], [], 0.0)[0]:
        found.append(Connection(listener.accept()[0], timeout))
    return found


def connect(endpoint: Endpoint, seconds: float, source: str | None) -> socket.socket:
    """Return a socket that is connected to the first node, which may start later.

    Args:
        endpoint: its address.
        seconds: how long to try.
        source: address of this node to connect from; None: the system's choice.

    Raises:
        OSError: if nobody has answered in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(
                (endpoint.host, endpoint.port),
                timeout=min(SEND_SECONDS, max(RETRY_SECONDS, deadline - time.monotonic())),
                source_address=None if source is None else (source, 0),
            )
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def gloo_variables(address: str) -> dict[str, str]:
    """Return the variables by which gloo takes the interface with an address of this node.

    By itself it takes the one of this machine's name, which is often the loopback's.
    """
    found = None if env.read(INTERFACE) else interface_of(address)
    return {} if found is None else {INTERFACE: found}


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None: it is not found."""
    if ":" in address:
        return None
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None
