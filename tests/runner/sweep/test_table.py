"""The results of a sweep, from its description and its runs (S3)."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from runner.recipe.schema import Recipe
from runner.runs import sessions
from runner.sweep import sweep as sweeps
from runner.sweep import table
from runner.sweep.sweep import Sweep
from tests.runner.sweep.stand_ins import begin_job, end_job
from tests.runner.sweep.test_sweep import described
from tests.runner.written_runs import write_session


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """A sweep of five jobs: two finished, one with NaN, one failed, one pending."""
    made = sweeps.create(str(tmp_path / "sweep"), Recipe(), described(1, 2, 3, 4, 5))
    for job, objective in enumerate([0.5, 0.25, float("nan")]):
        end_job(begin_job(made.path, job), objective, "accuracy", "max")
    sessions.end(begin_job(made.path, 3), 1)
    return made


def results(sweep: Sweep) -> table.Results:
    return table.results(sweep)


def test_rows_are_sorted_by_the_objective(sweep: Sweep) -> None:
    found = results(sweep)
    assert [row.job for row in found.rows] == [0, 1, 2, 3, 4]
    assert (found.metric, found.mode, found.swept) == ("accuracy", "max", ["seed"])
    assert found.best is not None
    assert found.best.job == 0
    assert [row.status for row in found.rows][2:] == ["finished", "failed", "pending"]


def test_the_smallest_is_first_where_the_mode_is_min(tmp_path: Path) -> None:
    made = sweeps.create(str(tmp_path / "sweep"), Recipe(), described(1, 2))
    for job, objective in enumerate([0.5, 0.25]):
        end_job(begin_job(made.path, job), objective)
    assert [row.job for row in results(made).rows] == [1, 0]


def test_the_csv_has_every_job_by_number(sweep: Sweep) -> None:
    table.write_csv(sweep, results(sweep))
    rows = list(csv.DictReader((sweep.path / "results.csv").open()))
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0] == {
        **{"job": "0", "seed": "1", "status": "finished", "objective": "0.5", "best_step": "7"},
        **{"step": "9", "seconds": "61.0", "run_dir": "0000"},
    }
    assert (rows[3]["status"], rows[3]["objective"]) == ("failed", "")


def test_the_best_job_is_shown_with_its_command(sweep: Sweep) -> None:
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    table.show(results(sweep), "own", console)
    shown = console.export_text()
    assert "accuracy (max)" in shown
    assert "1:01" in shown
    assert "best: job 0000\n  python -m runner --config-name own seed=1" in shown
    console.file.close()


def test_jobs_of_other_code_are_named(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1, 2):
        session = sweep.path / f"{number:04}" / "sessions" / "0001"
        (session / "environment.json").write_text(json.dumps({"code": {"mine": number // 2}}))
    table.conclude(sweep, "own")
    told = "1 of 5 jobs were trained with other Python code than job 0000, which has changed"
    assert f"{told} meanwhile: 0002" in capsys.readouterr().err


def test_the_command_has_no_keys_of_launchers_and_is_quoted(sweep: Sweep) -> None:
    row = results(sweep).rows[0]
    overrides = ("seed=1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "tags=[a, b]")
    command = table.command_of(table.Row(0, overrides, row.run), "config")
    assert command == "python -m runner seed=1 'tags=[a, b]'"


def test_jobs_of_a_sweeper_are_found_by_their_runs(tmp_path: Path) -> None:
    made = sweeps.create(str(tmp_path / "s"), Recipe(), replace(described(1), jobs=[]))
    begin_job(made.path, 2, ["optimizer.lr=0.5", "~scheduler=null", "hydra/sweeper=three"])
    (row,) = results(made).rows
    assert row.values == {"optimizer.lr": "0.5", "scheduler": "null"}


def test_values_of_different_metrics_are_not_compared(sweep: Sweep) -> None:
    end_job(begin_job(sweep.path, 4), 0.01)
    found = results(sweep)
    assert [row.job for row in found.rows] == [0, 1, 2, 3, 4]
    assert found.best is None
    console = Console(record=True, width=120)
    table.show(found, "config", console)
    text = console.export_text()
    assert "best: job" not in text
    assert "judged by different metrics, accuracy (max), loss (min)." in text
    assert "loss 0.01" in text


@pytest.mark.parametrize(("ended", "code"), [(None, 1), ({"code": 1}, 1), ({"code": 75}, 75)])
def test_the_exit_code_is_of_the_newest_try(
    ended: dict[str, int] | None, code: int, tmp_path: Path
) -> None:
    """S2: also of a job that was stopped before, and whose newest try made no step."""
    made = sweeps.create(str(tmp_path / "sweep"), Recipe(), described(1))
    sessions.end(begin_job(made.path, 0), 75)
    write_session(made.path / "0000", ended, begun=False)
    assert table.conclude(made, "own") == code
