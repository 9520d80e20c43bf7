"""States of data files: a few in the journal, a long list beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.sweep import changes, recorded_data
from runner.sweep.journal import Journal


def listed(folder: str, number: int) -> dict[str, Any]:
    return {f"data.files.{n}": {"path": f"{folder}/{n}", "files": 1} for n in range(number)}


def test_the_states_of_a_long_list_of_data_files_are_written_once(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    data = listed("/d", 5_000)
    written = {**data, "data.cache": {"path": "/d/cache", "files": 1}}
    for job in range(20):
        attempt = found.started(job, [], {}, data)
        assert found.state(job).data == data
        found.ended(job, attempt, [], 0, data=written)
    assert len(list(tmp_path.glob("data-*.json"))) == 2
    assert found.path.stat().st_size < 20_000
    states = found.states()
    assert all(state.data == written for state in states.values())
    assert len({id(state.data) for state in states.values()}) == 1
    for path in tmp_path.glob("data-*.json"):
        path.write_text("{")
    assert found.state(0).data == {}  # it is damaged: nothing is known
    assert found.state(0).is_complete


def test_a_few_stand_in_the_journal_itself(tmp_path: Path) -> None:
    data = listed("/d", recorded_data.MOST)
    assert recorded_data.written(tmp_path, data) == {"data": data}
    assert recorded_data.written(tmp_path, {}) == {}
    assert list(tmp_path.iterdir()) == []


def test_of_a_long_list_the_first_files_are_named(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    for job in range(3):
        found.started(job, [], {}, listed(str(tmp_path / "gone"), 100))
    (line,) = changes.lines(found.states())
    named = ", ".join(f"{tmp_path}/gone/{n}" for n in range(5))
    assert f"The data in {named} and 95 more, which jobs 0000, 0001, 0002 read" in line


def test_a_full_disk_is_told_as_that_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(recorded_data.json_files, "write_json", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        Journal(tmp_path).started(0, [], {}, listed("/d", 100))
