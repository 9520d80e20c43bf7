"""Commands of searches that a file chooses: begun, repeated, refused, listed (S4)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.exit_codes import FAILED, REFUSED
from tests.helpers import write_file
from tests.runner.sweep import stand_ins
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
    write_file(folder / "conf/experiment/search.yaml", FILE.format(**{**CHANGES, **changes}))


def sweeps(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/**/sweep-*"))


@pytest.mark.slow
def test_changed_settings_of_a_search_are_refused(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert cli.main(LINE) == 0
    assert server.taken() == [0, 1, 2]
    write(tmp_path, end=2, n_trials=4)
    assert cli.main(LINE) == REFUSED
    error = capsys.readouterr().err
    key = "hydra.sweeper.params.optimizer.lr="
    assert re.search(rf"{key}interval\(0.1, 2\): .* has {key}interval\(0.1, 1\)\.", error)
    assert "n_trials" not in error
    write(tmp_path, n_trials=4)
    assert cli.main(LINE) == 0
    assert server.taken() == [3]


@pytest.mark.slow
def test_failed_jobs_and_objectives_that_are_no_numbers_fail_the_search_each_time(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, n_trials=3)
    server.codes, server.objectives = {1: 1}, {2: float("nan")}
    for _ in range(2):
        assert cli.main(LINE) == FAILED
        error = capsys.readouterr().err
        assert "1 of 3 jobs failed: 0001" in error
        assert "1 of 3 jobs finished, but their objectives" in error
    assert server.taken() == [0, 1, 2, 1]


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
    assert not list(tmp_path.glob("runs/*"))
    shown = capsys.readouterr()
    assert "job" not in shown.out
    told = "the best of the monitored metric" if known else "there is one of that name"
    assert told in shown.err
    assert len(server.taken()) == (not known)


def test_no_password_of_a_database_is_written(
    server: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R8, S4: an address with a password is refused, unless it stays in the environment."""
    write(tmp_path, n_trials=2)
    line = [*LINE, "sweep.dir=here"]
    for key, url in (
        ("storage", "postgresql://user:s3cret@host/db"),
        ("storag", "a://b?pwd=s3cret"),
    ):
        assert cli.main([*line, f"hydra.sweeper.{key}='{url}'"]) == REFUSED
    assert not (tmp_path / "here").exists()
    file = tmp_path / "study.db"
    monkeypatch.setenv("STUDY", f"sqlite:///file:{file}?uri=true&password=s3cret")
    line.append("hydra.sweeper.storage='${oc.env:STUDY}'")
    assert cli.main(line) == 0
    assert cli.main(line) == 0  # the sweep knows it still
    assert server.taken() == [0, 1]
    write(tmp_path, n_trials=3)
    server.on_start = lambda order: file.write_bytes(b"no database" * 999)
    assert cli.main(line) == FAILED
    shown = capsys.readouterr()
    assert "storage=postgresql://user:***@host/db: no password is written" in shown.err
    assert re.search(r"storage=\$\{oc.env:STUDY\}: .*file is not a database", shown.err)
    written = [path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert written
    for text in (*written, shown.out.encode(), shown.err.encode()):
        assert b"s3cret" not in text


@pytest.mark.slow
def test_a_search_whose_jobs_lack_the_objective_has_failed(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, n_trials=2, metrics="validation/los", direction="minimize")
    assert cli.main([*LINE, "sweep.jobs=2"]) == FAILED
    assert "hydra.sweeper.metrics=validation/los: the run measures nothing" in (
        capsys.readouterr().err
    )
    assert server.taken() == [0]
