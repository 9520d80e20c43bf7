"""The results of a sweep, from its description and its journal (S3)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from rich.console import Console

from runner.recipe import hydra_setup
from runner.recipe.schema import Recipe
from runner.sweep import directory, table
from runner.sweep.directory import Sweep
from tests.runner.sweep.test_directory import described


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """A sweep of five jobs: two finished, one with NaN, one failed, one pending."""
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1, 2, 3, 4, 5))
    for job, objective in enumerate([0.5, 0.25, float("nan"), None]):
        attempt = made.journal.started(job, [f"seed={job + 1}"])
        code = 0 if objective is not None else 1
        values = {"metric": "accuracy", "mode": "max", "best_step": 7, "seconds": 61.0}
        made.journal.ended(
            job,
            attempt,
            [f"seed={job + 1}"],
            code,
            objective=objective,
            **(values if not code else {}),
        )
    return made


def results(sweep: Sweep) -> table.Results:
    return table.results(sweep, sweep.journal.states())


def test_rows_are_sorted_by_the_objective(sweep: Sweep) -> None:
    found = results(sweep)
    assert [row.job for row in found.rows] == [0, 1, 2, 3, 4]
    assert (found.metric, found.mode, found.swept) == ("accuracy", "max", ["seed"])
    assert found.best is not None
    assert found.best.job == 0
    assert [row.state.status for row in found.rows][2:] == ["finished", "failed", "pending"]


def test_the_smallest_is_first_where_the_mode_is_min(sweep: Sweep) -> None:
    attempt = sweep.journal.started(4, ["seed=5"])
    sweep.journal.path.write_text(sweep.journal.path.read_text().replace('"max"', '"min"'))
    sweep.journal.ended(4, attempt, ["seed=5"], 0, objective=[1.0, 2.0])
    assert [row.job for row in results(sweep).rows] == [1, 0, 4, 2, 3]


def test_the_csv_has_every_job_by_number(sweep: Sweep) -> None:
    table.write_csv(sweep, results(sweep))
    rows = list(csv.DictReader((sweep.path / "results.csv").open()))
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0] == {
        **{"job": "0", "seed": "1", "status": "finished", "objective": "0.5", "best_step": "7"},
        **{"step": "", "seconds": "61.0", "attempts": "1", "run_dir": "0000"},
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
        session.mkdir(parents=True)
        (session / "begun.json").write_text("{}")
        (session / "environment.json").write_text(json.dumps({"code": {"mine": number // 2}}))
    table.conclude("own", sweep, [0, 1, 2], {})
    told = "1 of 5 jobs were trained with other Python code than job 0000, which has changed"
    assert f"{told} meanwhile: 0002" in capsys.readouterr().err


def test_the_command_has_no_keys_of_launchers_and_is_quoted(sweep: Sweep) -> None:
    row = results(sweep).rows[0]
    overrides = ("seed=1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "tags=[a, b]")
    command = table.command_of(table.Row(0, {}, overrides, row.state, "0000"), "config")
    assert command == "python -m runner seed=1 'tags=[a, b]'"


def test_jobs_of_a_sweeper_are_found_in_the_journal(tmp_path: Path) -> None:
    from dataclasses import replace

    made = directory.create(str(tmp_path / "s"), Recipe(), replace(described(1), jobs=[]))
    made.journal.started(2, ["optimizer.lr=0.5", "~scheduler=null", "hydra/sweeper=three"])
    (row,) = results(made).rows
    assert row.values == {"optimizer.lr": "0.5", "scheduler": "null"}


@pytest.mark.usefixtures("hydra_session")
def test_a_value_has_one_form_in_grids_and_in_lists() -> None:
    typed = "1e-3 1_000 1e5 1.50 +3 .5 true False abc '1e-3' 1E-7 0x10 1. -2e-3 null 0 [1e-3]"
    for text in typed.split():
        ((of_grid,), _) = hydra_setup.expand([f"a={text},other"])
        assert table.plain_value(of_grid[2:]) == table.plain_value(text), text
    assert [table.plain_value(text) for text in ("1e-3", "True", "007", "2026-01")] == [
        *("0.001", "true", "007", "2026-01"),
    ]


def test_values_of_different_metrics_are_not_compared(sweep: Sweep) -> None:
    attempt = sweep.journal.started(4, ["seed=5"])
    values = {"metric": "loss", "mode": "min", "objective": 0.01}
    sweep.journal.ended(4, attempt, ["seed=5"], 0, **values)  # type: ignore[arg-type]
    found = results(sweep)
    assert [row.job for row in found.rows] == [0, 1, 2, 3, 4]
    assert found.best is None
    console = Console(record=True, width=120)
    table.show(found, "config", console)
    text = console.export_text()
    assert "best: job" not in text
    assert "judged by different metrics, accuracy (max), loss (min)." in text
    assert "loss 0.01" in text
