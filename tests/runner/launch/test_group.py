"""R9: processes as a group, at the moments that whole launches meet by chance alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from runner.launch import group
from runner.launch.group import Group, Maker, Stops, stops_heard
from runner.training.stopping import handlers_restored
from tests.helpers import ROOT, alive, ran, wait_until

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
EXITS = [sys.executable, "-c", "raise SystemExit(0)"]


class Child(subprocess.Popen[bytes]):
    send = subprocess.Popen.send_signal


def waiting(folder: Path) -> dict[int, Maker]:
    line = [sys.executable, "-c", WAITS, str(folder)]
    return {rank: partial(Child, line, env={**os.environ, "RANK": str(rank)}) for rank in (2, 3)}


def ready(folder: Path) -> list[int]:
    """Return the processes of both workers once they are ready."""
    places = [folder / f"{rank}.ready" for rank in (2, 3)]
    wait_until(lambda: all(p.exists() and p.read_text() for p in places))
    return [int(place.read_text()) for place in places]


@pytest.fixture
def stops() -> Iterator[Stops]:
    with handlers_restored([signal.SIGINT]):
        # A shell lets its background jobs ignore Ctrl-C; the tests may be one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with stops_heard() as found:
            yield found


def test_a_signal_from_before_the_workers_reaches_them(tmp_path: Path, stops: Stops) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert Group(stops).run(waiting(tmp_path)) == {}
    assert stops.received == [signal.SIGTERM]
    assert [(tmp_path / f"{rank}.got").read_text() for rank in (2, 3)] == ["15", "15"]


def test_those_inside_hear_what_those_around_have_heard(stops: Stops) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with stops_heard() as inner:
        assert inner.received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stops.received == [signal.SIGTERM, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) == stops.take


def test_control_c_ends_the_workers(tmp_path: Path, stops: Stops) -> None:
    def interrupt() -> None:
        ready(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Group(stops).run(waiting(tmp_path), meanwhile=interrupt)
    assert not any(map(alive, ready(tmp_path)))


def test_those_that_save_nothing_are_ended_by_a_stop(tmp_path: Path, stops: Stops) -> None:
    def stop() -> None:
        ready(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)

    assert Group(stops, save=False).run(waiting(tmp_path), meanwhile=stop) == {}
    assert stops.received[0] == signal.SIGUSR1
    assert not any(map(alive, ready(tmp_path)))


def test_an_exit_with_0_of_a_rank_that_is_not_finished_is_a_failure(stops: Stops) -> None:
    makers: dict[int, Maker] = {rank: partial(Child, EXITS) for rank in (2, 3)}
    failed = Group(stops).run(makers, lambda rank: rank == 2)
    assert failed.keys() <= {3}
    assert {failure.status for failure in failed.values()} == {0}


def test_the_users_folder_is_found_last(tmp_path: Path) -> None:
    """C4: nothing there is taken for the standard library, and the user's code is found."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken for the standard library')")
    (tmp_path / "mine.py").write_text("def main(order):\n    print('called with', order['word'])\n")
    line = group.command("mine", {"path": [str(ROOT), str(tmp_path)], "word": "hello"})
    ended = ran(line, tmp_path)
    assert (ended.stdout, ended.stderr) == ("called with hello\n", "")
