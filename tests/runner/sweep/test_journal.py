"""The journal: appended by many, read after any kill (S1)."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.sweep import journal
from runner.sweep.journal import Journal


def test_the_state_of_a_job_is_that_of_its_newest_attempt(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    assert found.states() == {}
    first = found.started(0, ["seed=1"])
    assert (found.state(0).status, found.state(0).pid) == ("running", os.getpid())
    found.ended(0, first, ["seed=1"], 1)
    assert found.state(0).status == "failed"
    second = found.started(0, ["seed=1"])
    found.ended(0, first, ["seed=1"], 1)  # late, by the parent of the first
    assert found.state(0).status == "running"
    found.ended(0, second, ["seed=1"], 0, objective=0.5, step=9)
    state = found.state(0)
    assert (state.status, state.attempts, state.objective) == ("finished", 2, 0.5)
    assert state.ended["step"] == 9
    found.started(0, ["seed=1"])  # nothing is left to do in it
    assert found.states()[0].is_complete


@pytest.mark.parametrize(
    ("code", "status"), [(0, "finished"), (1, "failed"), (2, "failed"), (75, "stopped")]
)
def test_the_status_follows_from_the_exit_code(code: int, status: str, tmp_path: Path) -> None:
    Journal(tmp_path).ended(3, "", [], code)
    assert journal.status_of(code) == status
    assert Journal(tmp_path).states()[3].ended["status"] == status


def test_objectives_that_json_does_not_know_and_lists(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    found.ended(0, "", [], 0, objective=math.nan)
    found.ended(1, "", [], 0, objective=[1.0, math.inf])
    value = found.state(0).objective
    assert isinstance(value, float)
    assert math.isnan(value)
    assert found.state(1).objective == [1.0, math.inf]
    assert found.state(2).objective is None


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    found.ended(0, "", [], 0)
    with found.path.open("a") as file:
        file.write('{"event": "started", "job": 1, "overr')
    assert list(found.states()) == [0]
    found.ended(2, "", [], 0)
    assert list(found.states()) == [0, 2]
    assert json.loads(found.path.read_text().splitlines()[-1])["job"] == 2


def _append(folder: Path, job: int) -> None:
    for _ in range(50):
        Journal(folder).ended(job, "", ["x" * 500], 0)


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(tmp_path, job)) for job in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    records = [json.loads(line) for line in Journal(tmp_path).path.read_text().splitlines() if line]
    assert [sum(one["job"] == job for one in records) for job in range(3)] == [50, 50, 50]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda file, line: 3)
    with pytest.raises(ConfigError, match="the disk is full"):
        Journal(tmp_path).started(0, [])
