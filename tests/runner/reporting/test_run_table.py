"""The table of `runner list`, and the same for programs (L1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.reporting import run_table
from runner.runs.record import RunRecord
from tests.runner.reporting.printed import printed
from tests.runner.written_runs import STARTED, change_summary, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunRecord]:
    return [
        RunRecord(write_run(tmp_path / "a", {"tags": ["[red]"]}, best=0.3, started=STARTED)),
        RunRecord(write_run(tmp_path / "b", best=float("nan"), started=STARTED + 20)),
        RunRecord(write_run(tmp_path / "c", best=0.1, started=STARTED + 10)),
    ]


def test_the_newest_is_first(runs: list[RunRecord]) -> None:
    assert [run.path.name for run in run_table.newest_first(runs)] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("key", "expected"), [("objective", "cab"), ("started", "acb"), ("optimizer.lr", "abc")]
)
def test_runs_are_sorted_and_those_without_a_value_last(
    key: str, expected: str, runs: list[RunRecord]
) -> None:
    found = run_table.in_order(runs, key)
    assert "".join(run.path.name for run in found) == expected


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_infinite_objective_is_never_the_best(mode: str, tmp_path: Path) -> None:
    values = [float("-inf"), 0.2, float("nan"), float("inf"), 0.1]
    found = []
    for number, best in enumerate(values):
        path = write_run(tmp_path / str(number), best=best)
        change_summary(path, mode=mode)
        found.append(RunRecord(path))
    names = [run.path.name for run in run_table.in_order(found, "objective")]
    assert names[:2] == (["4", "1"] if mode == "min" else ["1", "4"])


def test_objectives_of_other_metrics_stand_behind(tmp_path: Path) -> None:
    found = []
    for number, (metric, best) in enumerate(
        [("accuracy", 0.1), ("loss", 0.3), ("accuracy", 0.9), ("loss", 0.2), ("loss", 0.4)]
    ):
        path = write_run(tmp_path / str(number), best=best)
        change_summary(path, metric=metric, mode="max" if metric == "accuracy" else "min")
        found.append(RunRecord(path))
    ordered = run_table.in_order(found, "objective")
    assert "".join(run.path.name for run in ordered) == "31420"


def test_a_key_to_sort_by_has_to_be_there(runs: list[RunRecord]) -> None:
    for key in ("nothing", "since"):
        with pytest.raises(ConfigError):
            run_table.in_order(runs, key)


def test_the_table_has_what_the_run_has_and_reads_no_markup(runs: list[RunRecord]) -> None:
    text = printed(run_table.show, runs, ["tags", "optimizer.lr", "scheduler.nothing"])
    for expected in ('["[red]"]', "loss 0.3000", "0.005", "finished", "1:30"):
        assert expected in text


def test_programs_get_the_same(runs: list[RunRecord]) -> None:
    found = json.loads(run_table.as_json([run_table.described(run) for run in runs]))
    first = found[0]
    assert (first["status"], first["objective"], first["tags"]) == ("finished", 0.3, ["[red]"])
    assert found[1]["objective"] == "NaN"
