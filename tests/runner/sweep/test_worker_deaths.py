"""Which of several processes died first."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.sweep import worker_deaths
from runner.sweep.worker_deaths import Deaths
from tests.helpers import SECONDS


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that have noted themselves as those of the jobs 0, 1 and 2."""
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = [subprocess.Popen(line) for _ in range(3)]
    for number, one in enumerate(found):
        (tmp_path / f"{number}.pid").write_text(f"{one.pid} {platform.node()}")
    yield found
    for one in found:
        one.kill()
        one.wait(SECONDS)


def until_watched(deaths: Deaths, number: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(deaths._watched) != number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_death_is_told_from_those_that_follow(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with Deaths(tmp_path) as deaths:
        until_watched(deaths, 3)
        workers[1].kill()
        deaths._thread.join(SECONDS)
        for one in workers:  # as joblib does
            one.kill()
        deaths.settle()
    assert (deaths.first, deaths.others) == (1, [0, 2])
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_process_without_a_job_is_no_death(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with Deaths(tmp_path) as deaths:
        until_watched(deaths, 3)
        (tmp_path / "0.pid").unlink()  # its job has ended
        workers[0].kill()
        until_watched(deaths, 2)
        workers[2].kill()
        deaths._thread.join(SECONDS)
    assert (deaths.first, deaths.others) == (2, [1])


def test_of_deaths_at_once_the_first_is_not_known(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    for one in workers[:2]:
        one.kill()
    deaths = Deaths(tmp_path)
    deaths._look()
    ended = worker_deaths._ended(list(deaths._watched.values()), SECONDS)
    while len(ended) < 2:
        ended = worker_deaths._ended(list(deaths._watched.values()), SECONDS)
    assert deaths._has_died(ended)
    deaths.__exit__()
    deaths.settle()
    assert deaths.first is None
    assert len(list(tmp_path.iterdir())) == 3


def test_without_pidfds_nothing_is_known(tmp_path: Path) -> None:
    with Deaths(tmp_path, is_watched=False) as deaths:
        deaths.settle()
    assert (deaths.first, deaths.others) == (None, [])
