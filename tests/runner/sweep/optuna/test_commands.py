"""Commands of searches that a file chooses: begun, repeated, refused, listed (S4)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.exit_codes import FAILED, REFUSED
from tests.runner.sweep import databases, stand_ins
from tests.runner.sweep.stand_ins import StandIn

pytestmark = pytest.mark.usefixtures("elsewhere")
LINE = ["-m", "experiment=search"]
FILE = """
# @package _global_
defaults:
  - override /hydra/sweeper: optuna
hydra:
  sweeper:
    n_trials: {n_trials}
    n_jobs: 1
    sampler: random
    study_name: {study_name}
    storage: {storage}
    metrics: {metrics}
    direction: {direction}
    params:
      optimizer.lr: interval(0.1, {end})
"""
CHANGES = {
    **{"n_trials": 3, "study_name": "null", "storage": "null", "metrics": "null"},
    **{"direction": "null", "end": 1},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


def write(folder: Path, **changes: object) -> None:
    path = folder / "conf" / "experiment" / "search.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FILE.format(**{**CHANGES, **changes}))


def sweeps(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/**/sweep-*"))


def numbers(server: StandIn) -> list[int]:
    found = [order.number for order in server.orders]
    server.orders.clear()
    return found


@pytest.mark.slow
def test_changed_settings_of_a_search_are_refused(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert cli.main(LINE) == 0
    assert numbers(server) == [0, 1, 2]
    write(tmp_path, end=2, n_trials=4)
    assert cli.main(LINE) == REFUSED
    error = capsys.readouterr().err
    key = "hydra.sweeper.params.optimizer.lr="
    assert f"{key}interval(0.1, 2): {key}interval(0.1, 1) in" in error
    assert "n_trials" not in error
    write(tmp_path, n_trials=4)
    assert cli.main(LINE) == 0
    assert numbers(server) == [3]


@pytest.mark.slow
def test_failed_jobs_are_counted_among_all(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, n_trials=4)
    server.codes = {1: 1, 3: 1}
    assert cli.main(LINE) == 1
    assert cli.main(LINE) == 1
    assert capsys.readouterr().err.count("2 of 4 jobs failed: 0001, 0003") == 2


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_refused_search_leaves_nothing(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    shared: dict[str, Any] = {"storage": "shared.journal", "study_name": "s", "n_trials": 1}
    if not known:
        write(tmp_path, **shared)
        assert cli.main([*LINE, "sweep.dir=first"]) == 0
        capsys.readouterr()
    write(tmp_path, **shared, metrics="seconds" if not known else "null", direction="maximize")
    assert cli.main(LINE) == REFUSED
    assert sweeps(tmp_path) == []
    shown = capsys.readouterr()
    assert "job" not in shown.out
    told = "the best of the monitored metric" if known else "there is one of that name"
    assert told in shown.err
    assert len(numbers(server)) == (not known)


def test_no_password_of_a_database_is_written(
    server: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R8, S4: an address with a password is refused, unless it stays in the environment."""
    url = databases.url_in(tmp_path)
    write(tmp_path, n_trials=2, study_name="s")
    given = [*LINE, "sweep.dir=here"]
    for key in ("storage", "storag"):
        assert cli.main([*given, f"hydra.sweeper.{key}={url}"]) == REFUSED
    assert not (tmp_path / "here").exists()
    monkeypatch.setenv("STUDY", url)
    given.append("hydra.sweeper.storage='${oc.env:STUDY}'")
    assert cli.main(given) == 0
    assert cli.main(given) == 0  # the sweep knows it still
    assert numbers(server) == [0, 1]
    server.on_start = lambda order: monkeypatch.setattr(databases.StandIn, "is_away", True)
    write(tmp_path, n_trials=3, study_name="s")
    assert cli.main(given) == FAILED
    shown = capsys.readouterr()
    assert shown.err.count("storage='${oc.env:STUDY}'") == 1
    assert "Connection refused" in shown.err
    written = [path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert written
    secret = databases.PASSWORD.encode()
    assert not [
        text for text in (*written, shown.out.encode(), shown.err.encode()) if secret in text
    ]


@pytest.mark.slow
def test_a_search_whose_jobs_lack_the_objective_has_failed(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, n_trials=2, metrics="validation/los", direction="minimize")
    assert cli.main([*LINE, "tags=[x]", "sweep.jobs=2"]) == FAILED
    shown = capsys.readouterr()
    assert "hydra.sweeper.metrics=validation/los: the run measures nothing" in shown.err
    assert numbers(server) == [0]
    (line,) = (line for line in shown.out.splitlines() if "job 0000 finished" in line)
    assert re.search(r"  optimizer\.lr=0\.\d+$", line)  # what all jobs share is not shown


@pytest.mark.slow
def test_a_job_whose_objective_is_no_number_has_failed_each_time(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, n_trials=2)
    server.objectives = {1: float("nan")}
    for _ in range(2):
        assert cli.main(LINE) == 1
        assert "1 of 2 jobs finished, but their objectives" in capsys.readouterr().err
    assert numbers(server) == [0, 1]
