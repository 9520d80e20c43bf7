"""Finished jobs whose run directories are gone."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from runner import cli
from runner.recipe.schema import Recipe
from runner.sweep import directory, missing_runs
from runner.sweep.directory import Sweep
from tests.runner.sweep import stand_ins
from tests.runner.sweep.stand_ins import StandIn
from tests.runner.sweep.test_directory import described

LINE = ["-m", "seed=1,2,3", "optimizer.lr=0.5"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


@pytest.fixture
def finished(tmp_path: Path) -> Sweep:
    """A sweep of three jobs, two of them finished, that have directories."""
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1, 2, 3))
    for job in (0, 1):
        made.run_dir(job).mkdir()
        (made.run_dir(job) / "config.yaml").touch()
        attempt = made.journal.started(job, [f"seed={job + 1}"])
        made.journal.ended(job, attempt, [f"seed={job + 1}"], 0, objective=0.5)
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_removing_a_directory_asks_for_training_it_again(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(LINE) == 0
    (sweep,) = tmp_path.glob("runs/digits/sweep-*")
    shutil.rmtree(sweep / "0001")
    server.orders.clear()
    capsys.readouterr()
    assert cli.main(LINE) == 0
    assert [order.number for order in server.orders] == [1]
    shown = capsys.readouterr().out
    assert "(3 jobs, 2 are finished)" in shown
    assert "The directory of finished job 0001 is missing: it is trained again." in shown
    rows = list(csv.DictReader((sweep / "results.csv").open()))
    assert [(row["status"], row["attempts"]) for row in rows] == [
        ("finished", "1"),
        ("finished", "2"),
        ("finished", "1"),
    ]
    server.orders.clear()
    assert cli.main(LINE) == 0
    assert server.orders == []


def test_it_is_pending_until_it_has_ended_again(finished: Sweep) -> None:
    shutil.rmtree(finished.run_dir(1))
    states = finished.journal.states()
    assert missing_runs.of_finished(finished, states) == [1]
    assert missing_runs.forget(finished, [1], states) == [1]
    after = finished.journal.states()[1]
    assert (after.status, after.attempt, after.attempts) == ("pending", "", 1)
    assert after.overrides == ["seed=2"]
    attempt = finished.journal.started(1, ["seed=2"])
    missing_runs.forget(finished, [1], states)  # by a command that has looked before
    assert finished.journal.state(1).status == "running"
    finished.journal.ended(1, attempt, ["seed=2"], 0, objective=0.25)
    finished.journal.removed({1: states[1]})
    state = finished.journal.state(1)
    assert (state.status, state.objective, state.attempts) == ("finished", 0.25, 2)


def test_a_directory_that_is_there_all_the_same_is_left_alone(finished: Sweep) -> None:
    states = finished.journal.states()
    assert missing_runs.forget(finished, [0], states) == []  # a stale listing of a file server
    assert finished.journal.states() == states


@pytest.mark.parametrize("left", [[], [".lock"]], ids=["nothing", "a-lock"])
def test_a_directory_that_was_emptied_is_as_good_as_gone(left: list[str], finished: Sweep) -> None:
    (finished.run_dir(1) / "config.yaml").unlink()
    for name in left:
        (finished.run_dir(1) / name).touch()
    states = finished.journal.states()
    assert missing_runs.of_finished(finished, states) == [1]
    assert missing_runs.forget(finished, [1], states) == [1]
    assert finished.journal.state(1).status == "pending"


def test_a_directory_in_which_something_is_left_is_not(finished: Sweep) -> None:
    (finished.run_dir(1) / "config.yaml").rename(finished.run_dir(1) / "metrics.jsonl")
    states = finished.journal.states()
    assert missing_runs.of_finished(finished, states) == []
    assert missing_runs.forget(finished, [1], states) == []


def test_what_is_not_finished_needs_no_directory(finished: Sweep) -> None:
    assert missing_runs.of_finished(finished, finished.journal.states()) == []


def test_results_of_a_study_stay() -> None:
    assert missing_runs.line([2], again=False) == (
        "The directory of finished job 0002 is missing: its result stays, it is not trained again."
    )
    assert "jobs 0000, 0001 are missing: their results stay" in missing_runs.line(
        [1, 0], again=False
    )
