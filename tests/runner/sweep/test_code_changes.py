"""Jobs of a sweep whose code has changed since they ran."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import cli
from runner.sweep import code_changes
from runner.sweep.fork_server import Order
from runner.sweep.journal import JobState
from tests.runner.sweep import stand_ins
from tests.runner.sweep.stand_ins import StandIn

LINE = ["-m", "seed=1,2,3", "optimizer.lr=0.5"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's, in a project that trusts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUNNER_IMPORTS", "wine_of_sweeps")
    path = tmp_path / "wine_of_sweeps.py"
    path.write_text("WIDTH = 1\n")
    yield path
    sys.modules.pop("wine_of_sweeps", None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_code_that_has_changed_is_said_once_before_jobs_start(
    server: StandIn, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.codes = {1: 1}
    assert cli.main(LINE) == 1
    assert "has changed since" not in capsys.readouterr().err
    package.write_text("WIDTH = 2\n")
    server.codes = {}
    said: list[str] = []
    server.on_start = lambda order: said.append(capsys.readouterr().err)
    assert cli.main(LINE) == 0
    (before,) = said
    assert "code of package wine_of_sweeps has changed since jobs 0000, 0001, 0002 ran" in before
    assert "Finished jobs are kept. Jobs that are not finished go on with the new code." in before
    assert "sweep.dir=<a new directory> trains all with the new code" in before
    assert "has changed since" not in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_code_that_changes_while_jobs_run_is_said_under_their_table(
    server: StandIn, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(order: Order) -> None:
        if order.number == 1:
            package.write_text("WIDTH = 2\n")

    server.on_start = edit  # once the job has recorded its code
    assert cli.main(LINE) == 0
    shown = capsys.readouterr()
    assert "best: job 0000" in shown.out
    assert "code of package wine_of_sweeps has changed since jobs 0000, 0001 ran." in shown.err
    assert "Finished jobs are kept. sweep.dir=" in shown.err


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_it_is_said_where_nothing_is_left_to_do(
    server: StandIn, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(LINE) == 0
    capsys.readouterr()
    assert cli.main(LINE) == 0
    assert "has changed since" not in capsys.readouterr().err
    package.write_text("WIDTH = 2\n")
    assert cli.main(LINE) == 0
    shown = capsys.readouterr()
    assert "Nothing is left to do" in shown.out
    assert "wine_of_sweeps has changed since jobs 0000, 0001, 0002 ran." in shown.err
    assert "Finished jobs are kept. sweep.dir=" in shown.err


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_each_attempt_records_its_code(server: StandIn, package: Path, tmp_path: Path) -> None:
    assert cli.main(LINE) == 0
    (journal,) = tmp_path.glob("runs/digits/sweep-*/journal.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    codes = [one["code"] for one in records if one["event"] == "started"]
    assert codes == [code_changes.of_project()] * 3
    assert list(codes[0]) == ["wine_of_sweeps"]


def test_of_many_jobs_the_first_are_named_and_the_files_read_once(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = code_changes.of_project
    monkeypatch.setattr(code_changes, "of_project", lambda: read.append(1) or real())
    states = {n: JobState("finished", code={"wine_of_sweeps": "old"}) for n in range(10_000)}
    found = code_changes.lines(states)
    assert len(read) == 1
    assert "jobs 0000, 0001, 0002, 0003, 0004 and 9995 more ran." in found[0]


def test_jobs_of_earlier_versions_have_recorded_nothing(package: Path) -> None:
    assert code_changes.lines({0: JobState("finished")}) == []
