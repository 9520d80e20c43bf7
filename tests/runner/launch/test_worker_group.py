"""A group of worker processes, at the moments that whole launches meet by chance alone (R9)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.launch.worker_group import Place, StopSignals, WorkerGroup
from runner.training.stopping import handlers_restored
from tests.helpers import alive

PLACE = Place(2, 2, 4, 1, 2, "node0", 1234, "launch_1", {"GLOO_SOCKET_IFNAME": "lo"})
# A worker that is ready for signals leaves a file, and notes the stop signal that it gets.
WAITS = """
import os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1]) / os.environ["RANK"]
def note(number, frame):
    place.with_suffix(".got").write_text(str(number))
    os._exit(0)
signal.signal(signal.SIGTERM, note)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
place.with_suffix(".ready").write_text(str(os.getpid()))
time.sleep(300)
"""
ENDS = "import os, sys; sys.exit(int(sys.argv[1 + int(os.environ['LOCAL_RANK'])]))"


def waiting(folder: Path) -> WorkerGroup:
    return WorkerGroup([sys.executable, "-c", WAITS, str(folder)], PLACE)


def ready(folder: Path) -> list[int]:
    """Return the processes of both workers once they are ready."""
    places = [folder / f"{rank}.ready" for rank in (2, 3)]
    deadline = time.monotonic() + 300
    while not all(p.exists() and p.read_text() for p in places) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [int(place.read_text()) for place in places]


@pytest.fixture
def stops() -> Iterator[StopSignals]:
    with handlers_restored([signal.SIGINT]):
        # A shell lets its background jobs ignore Ctrl-C; the tests may be one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with StopSignals().installed() as found:
            yield found


def test_a_signal_from_before_the_workers_reaches_them(tmp_path: Path, stops: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    group = waiting(tmp_path)
    with stops.running(group):
        group.wait()
    assert stops.received == [signal.SIGTERM]
    assert group.failed == {}
    assert [(tmp_path / f"{rank}.got").read_text() for rank in (2, 3)] == ["15", "15"]


def test_a_signal_that_those_around_have_got_is_known(stops: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # before those of a run are installed
    with StopSignals().installed() as inner:
        assert inner.received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inner.received == stops.received == [signal.SIGTERM, signal.SIGUSR1]


def test_control_c_ends_the_workers(tmp_path: Path, stops: StopSignals) -> None:
    def interrupted() -> None:
        with stops.running(waiting(tmp_path)):
            ready(tmp_path)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(map(alive, ready(tmp_path)))


def test_workers_that_are_left_are_ended(tmp_path: Path, stops: StopSignals) -> None:
    group = waiting(tmp_path)
    with stops.running(group):
        processes = ready(tmp_path)
        os.kill(processes[1], signal.SIGKILL)
        group.wait()
        assert {rank: failure.status for rank, failure in group.failed.items()} == {3: -9}
        assert alive(processes[0])
    assert not any(map(alive, processes))
    assert list(group.failed) == [3]


def test_an_exit_with_0_of_a_rank_that_is_not_finished_is_a_failure(stops: StopSignals) -> None:
    group = WorkerGroup([sys.executable, "-c", ENDS, "0", "0"], PLACE, lambda rank: rank == 2)
    with stops.running(group):
        group.wait()
    assert {rank: failure.status for rank, failure in group.failed.items()} == {3: 0}
