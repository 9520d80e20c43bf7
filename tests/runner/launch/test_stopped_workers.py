"""Workers that are stopped, by a clock that the tests turn on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from runner.launch import stopped_workers
from runner.launch.stopped_workers import SILENT_LIMITS, StoppedWorkers, process_state
from tests.helpers import python

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read in /proc")
LIMIT, GRACE = 20.0, 3.0
RUNNING = {2: 102, 3: 103}  # processes of ranks


class World:
    """Processes with states, and their parent's watch: of all that is looked at each second."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        self.now = 1000.0
        self.states = dict.fromkeys(RUNNING.values(), "S")
        self.beats: dict[int, int | None] = {}
        with self.installed():
            self.watch = StoppedWorkers(limit, GRACE, lambda rank: self.beats.get(rank))

    def installed(self) -> patch.multiple:  # type: ignore[valid-type]
        return patch.multiple(
            stopped_workers,
            process_state=lambda pid: self.states.get(pid, "X"),
            time=type("Time", (), {"monotonic": lambda: self.now}),
        )

    def after(self, seconds: float) -> dict[int, str]:
        """Return who has failed within so many seconds."""
        with self.installed():
            for _ in range(int(seconds * 10)):
                self.now += 0.1
                found = self.watch.failed({r: p for r, p in RUNNING.items() if p in self.states})
                if found:
                    return found
        return {}


def test_all_workers_stopped_for_the_limit_hang() -> None:
    world = World()
    world.states.update({102: "T", 103: "T"})
    assert world.after(LIMIT - 1) == {}
    found = world.after(3)
    assert list(found) == [2, 3]
    assert found[2].startswith("it hangs: its process 102 on ")
    assert found[2].endswith(
        " it is stopped (SIGSTOP?), as are all workers that this command has started"
    )


def test_one_worker_that_runs_is_left_to_the_watchdogs() -> None:
    world = World()
    world.states[102] = "T"
    assert world.after(3 * LIMIT) == {}
    del world.states[103]  # it has finished: the other one is all workers
    found = world.after(2)
    assert list(found) == [2]
    assert "as are all" not in found[2]


def test_without_a_limit_workers_may_be_stopped_for_ever() -> None:
    world = World(limit=None)
    world.states.update({102: "T", 103: "T"})
    assert world.after(10 * LIMIT) == {}


def test_a_worker_that_goes_on_is_counted_anew() -> None:
    world = World()
    for _ in range(5):
        world.states.update({102: "T", 103: "T"})
        assert world.after(LIMIT - 2) == {}
        world.states[103] = "S"
        assert world.after(2) == {}


def test_a_debugger_may_hold_all_workers() -> None:
    world = World()
    world.states.update({102: "t", 103: "t"})
    world.watch.request("SIGTERM")
    assert world.after(3 * LIMIT) == {}


def test_time_in_which_the_parent_was_stopped_too_does_not_count() -> None:
    world = World()
    world.states.update({102: "T", 103: "T"})
    world.watch.request("SIGTERM")
    assert world.after(1) == {}
    world.now += 100 * LIMIT
    assert world.after(0.5) == {}
    world.states.update({102: "S", 103: "S"})
    assert world.after(3 * LIMIT) == {}


def test_a_stopped_worker_that_does_not_answer_a_stop_signal_fails_alone() -> None:
    world = World(limit=None)
    world.states[102] = "T"
    assert world.after(10 * GRACE) == {}
    world.watch.request("SIGTERM")
    assert world.after(GRACE - 1) == {}
    found = world.after(3)
    assert list(found) == [2]  # the other one saves its state, and takes its time
    assert found[2].startswith("its process 102 on ")
    assert found[2].endswith(" does not answer SIGTERM: it is stopped (SIGSTOP?)")


def test_workers_whose_watchdogs_are_all_silent_hang() -> None:
    world = World()
    world.beats = {2: 7, 3: 9}
    assert world.after(SILENT_LIMITS * LIMIT - 2) == {}
    found = world.after(4)
    assert list(found) == [2, 3]
    assert found[3].startswith("it hangs: the watchdog of its process 103 on ")
    assert found[3].endswith(" is silent: native code keeps the interpreter; its log has the stack")


@pytest.mark.parametrize("other", ["beats", "is-not-watched"])
def test_a_worker_that_is_silent_beside_others_is_left_to_the_watchdogs(other: str) -> None:
    world = World()
    world.beats = {2: 7}
    for beat in range(10):
        world.beats[3] = beat if other == "beats" else None
        assert world.after(SILENT_LIMITS * LIMIT / 5) == {}


def test_heartbeats_are_counted_by_the_time_in_which_the_parent_ran() -> None:
    world = World()
    world.beats = {2: 7, 3: 9}
    assert world.after(LIMIT) == {}
    world.now += 100 * SILENT_LIMITS * LIMIT  # suspended together
    assert world.after(LIMIT) == {}
    world = World(limit=None)
    world.beats = {2: 7, 3: 9}
    assert world.after(2 * SILENT_LIMITS * LIMIT) == {}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(python("-c", "import time; time.sleep(300)")) as process:
        yield process
        process.kill()


@LINUX
def test_the_state_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_state(os.getpid()) == "R"
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert process_state(sleeper.pid) == "T"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(str(sleeper.pid)) == "Z"
    sleeper.wait()
    assert process_state(sleeper.pid) == "X"


def test_a_system_without_proc_says_nothing() -> None:
    with patch.object(Path, "exists", return_value=False):
        assert process_state("none") == "?"
