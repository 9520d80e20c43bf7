"""Filters of `runner list` (L1)."""

from __future__ import annotations

import time

import pytest

from accel.machine.errors import ConfigError
from runner.reporting import filters
from runner.runs.record import RunRecord
from tests.runner.written_runs import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("runs")
    now = time.time()
    return [
        RunRecord(write_run(folder / "a", {"optimizer.lr": 0.01, "tags": ["x", "y"]}, best=0.1)),
        RunRecord(write_run(folder / "b", {"optimizer.lr": 1e-5, "name": "other"}, started=now)),
        RunRecord(write_run(folder / "c", {"seed": 3, "scheduler": None}, summary=False)),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.lr=0.01"], "a"),
        (["optimizer.lr<0.001"], "b"),
        (["optimizer.lr!=0.01"], "bc"),
        (["name=dig*"], "ac"),
        (["name=other,digits", "status=interrupted"], "c"),
        (["tag=x"], "a"),
        (["since=1h"], "b"),
        (["before=1h"], "ac"),
        (["since=2026-01-01"], "abc"),
        (["objective<=0.1"], "a"),
        (["scheduler=null"], "c"),
        (["scheduler.name=cosine"], "ab"),
        ([], "abc"),
    ],
)
def test_runs_are_filtered(words: list[str], expected: str, runs: list[RunRecord]) -> None:
    found = filters.apply(filters.parse(words), runs)
    assert "".join(run.path.name for run in found) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("failed", "neither a folder nor a filter"),
        ("status=fail", "Did you mean 'failed'"),
        ("since=yesterday", "an age such as 30m"),
        ("since>2d", "Write since=2d"),
        ("step>many", "compares numbers"),
        ("status==failed", "neither a folder nor a filter"),
    ],
)
def test_a_word_that_is_no_filter_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filters.parse([word])
