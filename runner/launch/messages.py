"""Messages between the commands of several nodes: JSON lines over TCP, with a sign of life.

The command of the first node listens; each other node's connects, and stays connected to its end.
So a command that is killed is noticed at once, and a link that is cut after the time-out. A thread
says that this side is alive, whatever the main thread does. Free of torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from accel.machine import env
from runner.recipe.nodes import Endpoint
from runner.recipe.processes import INTERFACE

ALIVE = "alive"
SIGNS_PER_TIMEOUT = 6
SEND_SECONDS = 10.0
MOST_BYTES = 1 << 24  # of one message: a recipe is some kilobytes
RETRY_SECONDS = 0.2
# A connection that has not said who it is by then is no node's.
HELLO_SECONDS = 30.0
_SIOCGIFADDR = 0x8915


class Lost(Exception):
    """The other side of a connection is gone; the message says how that was noticed."""


class Connection:
    """One side of a connection between two nodes.

    Args:
        end: a connected socket, which is closed with this.
        timeout: seconds without a word after which the other side counts as lost, from the first
            word on.
        patience: seconds until the first word.
    """

    def __init__(self, end: socket.socket, timeout: float, patience: float = float("inf")) -> None:
        self._end, self._timeout, self._silence = end, timeout, patience
        self._end.settimeout(SEND_SECONDS)
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest, self._failure = b"", ""
        self._heard = time.monotonic()
        self._sending, self._closing = threading.Lock(), threading.Event()
        self._signs = threading.Thread(target=self._say_alive, name="node alive", daemon=True)
        self._signs.start()

    @property
    def address(self) -> str:
        """This side's address, as the other side reaches it."""
        return str(self._end.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer(self) -> str:
        """The other side's address."""
        return str(self._end.getpeername()[0]).removeprefix("::ffff:")

    def send(self, kind: str, **content: object) -> None:
        """Send a message; a failure is raised by `received`."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        try:
            with self._sending:
                self._end.sendall(line)
        except OSError as error:
            self._failure = self._failure or f"a message could not be sent ({error})"

    def received(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call.

        Raises:
            Lost: if the other side has ended, or has not said a word for too long.
        """
        found: list[dict[str, Any]] = []
        ended = ""
        while select.select([self._end], [], [], 0.0)[0]:
            try:
                data = self._end.recv(1 << 16)
            except OSError as error:
                ended = f"its connection broke ({error.strerror or error})"
                break
            if not data:
                ended = "its connection was closed"
                break
            self._heard, self._silence = time.monotonic(), self._timeout
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [_message(line) for line in lines]
            if len(self._rest) > MOST_BYTES:
                raise Lost("it sends no messages of a runner's")
        if found:  # the end is found again by the next call
            return [message for message in found if message["kind"] != ALIVE]
        if ended or self._failure:
            raise Lost(ended or self._failure)
        if time.monotonic() - self._heard > self._silence:
            raise Lost(f"no word from it for {self._silence:.0f} s")
        return []

    def close(self) -> None:
        """Close the connection when what was sent has arrived, or soon."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + SEND_SECONDS / 2
            while (left := deadline - time.monotonic()) > 0:
                if select.select([self._end], [], [], left)[0] and not self._end.recv(1 << 16):
                    break
        self._end.close()
        self._signs.join(SEND_SECONDS)

    def _say_alive(self) -> None:
        pause = min(self._timeout / SIGNS_PER_TIMEOUT, 5.0)
        while not self._closing.wait(pause):
            self.send(ALIVE)


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
        found.append(Connection(listener.accept()[0], timeout, HELLO_SECONDS))
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
