"""The table of `runner list`, and the same for programs (L1)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from accel.machine.errors import ConfigError
from runner.reporting import run_table
from runner.runs.record import RunRecord
from tests.runner.written_runs import STARTED, change_summary, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunRecord]:
    return [
        RunRecord(write_run(tmp_path / "a", {"tags": ["[red]"]}, best=0.3, started=STARTED)),
        RunRecord(write_run(tmp_path / "b", best=float("nan"), started=STARTED + 20)),
        RunRecord(write_run(tmp_path / "c", best=0.1, started=STARTED + 10)),
    ]


def shown(runs: list[RunRecord], *keys: str) -> str:
    out = io.StringIO()
    run_table.show(runs, keys, Console(file=out, width=300))
    return out.getvalue()


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
    assert names == (["4", "1", "0", "3", "2"] if mode == "min" else ["1", "4", "0", "3", "2"])


def test_objectives_of_other_metrics_stand_behind(tmp_path: Path) -> None:
    found = []
    for number, (metric, best) in enumerate(
        [("accuracy", 0.1), ("loss", 0.3), ("accuracy", 0.9), ("loss", 0.2), ("loss", 0.4)]
    ):
        path = write_run(tmp_path / str(number), best=best)
        change_summary(path, metric=metric, mode="max" if metric == "accuracy" else "min")
        found.append(RunRecord(path))
    shown = ["".join(r.path.name for r in run_table.in_order(found, "objective", reverse=reverse))
             for reverse in (False, True)]  # fmt: skip
    assert shown == ["31420", "41302"]


def test_a_key_to_sort_by_has_to_be_there(runs: list[RunRecord]) -> None:
    for key in ("nothing", "since"):
        with pytest.raises(ConfigError):
            run_table.in_order(runs, key)


def test_the_table_has_what_the_run_has_and_reads_no_markup(runs: list[RunRecord]) -> None:
    text = shown(runs, "optimizer.lr", "scheduler.nothing")
    assert "[red]" in text
    assert "loss 0.3000" in text
    assert "0.005" in text
    assert "finished" in text
    assert "1:30" in text


def test_programs_get_the_same(runs: list[RunRecord]) -> None:
    (first, *_) = json.loads(run_table.as_json(runs))
    assert (first["status"], first["objective"], first["tags"]) == ("finished", 0.3, ["[red]"])
    assert json.loads(run_table.as_json(runs))[1]["objective"] == "NaN"


def test_a_row_for_each_run_and_a_reason_for_one_that_failed() -> None:
    out = io.StringIO()
    rows = [
        (Path("/runs/a"), {"step": 20, "metrics": {"test": {"loss": 0.5}}, "notes": []}),
        (
            Path("/runs/b"),
            {"step": None, "metrics": {"validation": {"loss": 0.25}}, "notes": ["other code"]},
        ),
        (Path("/runs/c"), "its checkpoint [x] is broken"),
    ]
    run_table.show_evaluations(rows, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["run", "step", "test", "loss", "validation", "loss"]
    assert lines[3].split() == ["/runs/a", "20", "0.5000"]
    assert lines[4].split() == ["/runs/b", "0.2500", "see", "below"]
    assert lines[5].split() == ["/runs/c", "failed"]
    assert len(lines[5].rstrip()) < 60  # the table is no wider than its numbers
    assert "/runs/b: other code" in lines
    assert "/runs/c: failed: its checkpoint [x] is broken" in lines
