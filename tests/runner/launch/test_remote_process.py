"""A process is started, heard, signalled and ended, as an actor of Ray's does it on its node.

Holds R9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from runner.launch import remote_process
from runner.launch.remote_process import ENDED, OUTPUT, STARTED, ProcessHost
from tests.helpers import SECONDS, alive, python

PRINTS = "import sys; print(sys.argv[1]); print(sys.stdin.read(), file=sys.stderr); sys.exit(3)"
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("ready", flush=True)
time.sleep(1000)
"""

# A node that has no runner.
THERE = """
import pickle, sys
sys.modules.update(runner=None, accel=None)
host = pickle.loads(bytes.fromhex(sys.argv[1]))()
host.start("import os; os._exit(0)", {})
while not any(kind == "ended" for kind, _ in host.events(1.0)):
    pass
print("ended")
"""


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


def test_kill_ends_it() -> None:
    host = ProcessHost()
    host.kill()  # nothing is there yet
    host.start(WAITS, {})
    (_, pid), *_ = until(host, OUTPUT)
    host.kill()
    assert until(host, ENDED)[-1] == (ENDED, -signal.SIGKILL)
    assert not alive(pid)


def test_processes_of_one_node_follow_each_other() -> None:
    places = [{"node": node} for node in "abacb"]
    assert remote_process.in_order(places) == [0, 2, 1, 4, 3]


def test_the_class_needs_python_alone() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(remote_process)
    try:
        pickled = cloudpickle.dumps(ProcessHost)
    finally:
        cloudpickle.unregister_pickle_by_value(remote_process)
    line = python("-c", THERE, pickled.hex())
    assert subprocess.run(line, check=True, capture_output=True).stdout == b"ended\n"
