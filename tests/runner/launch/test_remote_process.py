"""A process is started, heard, signalled and ended, as an actor of Ray's does it on its node.

Holds R9.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from runner.launch.remote_process import ENDED, OUTPUT, STARTED, ProcessHost
from tests.helpers import SECONDS

PRINTS = "import sys; print(sys.argv[1]); print(sys.stdin.read(), file=sys.stderr); sys.exit(3)"
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("ready", flush=True)
time.sleep(1000)
"""

# A node that has no runner.


def until(host: ProcessHost, kind: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    deadline = time.monotonic() + SECONDS
    while not any(one == kind for one, _ in found):
        assert time.monotonic() < deadline
        found += host.events(0.1)
    return found


def test_output_and_exit_status_are_events() -> None:
    host = ProcessHost()
    host.start(PRINTS, {"a": 1}, b"input")
    found = until(host, ENDED)
    assert next(kind for kind, _ in found) == STARTED
    assert found[-1] == (ENDED, 3)
    output = {1: b"", 2: b""}
    for kind, value in found:
        if kind == OUTPUT:
            output[value[0]] += value[1]
    assert output == {1: f'{{"a": 1, "parent": {os.getpid()}}}\n'.encode(), 2: b"input\n"}
    assert host.events(0.0) == []


def test_a_signal_reaches_a_process_that_is_just_starting() -> None:
    host = ProcessHost()
    host.start(WAITS, {})
    host.send(signal.SIGTERM)  # held back until it can be handled
    assert until(host, ENDED)[-1] == (ENDED, 7)
    host.send(signal.SIGTERM)  # nobody is there any more
