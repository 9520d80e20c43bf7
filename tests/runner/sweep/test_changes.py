"""Jobs of a sweep whose code or data has changed since they ran."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import cli
from runner.run_dir import data_files
from runner.sweep import changes
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
    assert codes == [changes.of_project()] * 3
    assert list(codes[0]) == ["wine_of_sweeps"]


@pytest.mark.usefixtures("elsewhere")
def test_data_that_has_changed_is_said_until_all_jobs_have_the_same(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "library"
    data.mkdir()
    (data / "a.py").write_text("1\n")
    line = ["-m", "experiment=bytes_gpt", "seed=1,2,3", f"data.path={data}"]
    assert cli.main(line) == 0
    assert "has changed since" not in capsys.readouterr().err
    (data / "a.py").write_text("1, 2\n")
    (sweep,) = tmp_path.glob("runs/*/sweep-*")
    shutil.rmtree(sweep / "0001")
    said: list[str] = []
    server.on_start = lambda order: said.append(capsys.readouterr().err)
    assert cli.main(line) == 0
    (before,) = said
    assert f"The data in {data} has changed since jobs 0000, 0002 ran.\n" in before
    assert "sweep.dir=<a new directory> trains all with the new data." in before
    assert cli.main(line) == 0  # nothing is left to do
    assert f"The data in {data} has changed since jobs 0000, 0002 ran." in capsys.readouterr().err
    shutil.rmtree(data)
    assert cli.main(line) == 0
    shown = capsys.readouterr().err
    assert "has changed" not in shown
    assert shown.count("is not there on this machine") == 1
    assert f"The data in {data}, which jobs 0000, 0001, 0002 read, is not there" in shown


def test_data_that_is_not_there_is_said_once_and_claims_no_change(tmp_path: Path) -> None:
    """Each job may have had a copy of its own, on the disk of a node."""
    states = {}
    for number in range(8):
        path = tmp_path / f"{number}.csv"
        path.write_text("1")
        states[number] = JobState("finished", data=data_files.find({"path": str(path)}))
        if number:
            path.unlink()
    paths = ", ".join(f"{tmp_path}/{number}.csv" for number in range(1, 6))
    absent = (
        f"The data in {paths} and 2 more, which jobs 0001, 0002, 0003, 0004, 0005 and 2 more read, "
        "is not there on this machine."
    )
    assert changes.lines(states) == [absent]
    (tmp_path / "0.csv").write_text("12")
    changed, remedy, last = changes.lines(states)
    assert changed == f"The data in {tmp_path}/0.csv has changed since job 0000 ran."
    assert remedy.startswith("Finished jobs are kept.")
    assert last == absent


def test_of_many_jobs_one_file_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = data_files.state
    monkeypatch.setattr(data_files, "state", lambda path: looked.append(path) or real(path))
    path = tmp_path / "d.csv"
    path.write_text("1")
    found = data_files.find({"path": str(path)})
    looked.clear()
    path.write_text("12")
    states = {n: JobState("finished", data=found) for n in range(10_000)}
    assert "jobs 0000, 0001, 0002, 0003, 0004 and 9995 more ran." in changes.lines(states)[0]
    assert looked == [str(path)]


def test_of_many_jobs_the_first_are_named_and_the_files_read_once(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = changes.of_project
    monkeypatch.setattr(changes, "of_project", lambda: read.append(1) or real())
    states = {n: JobState("finished", code={"wine_of_sweeps": "old"}) for n in range(10_000)}
    found = changes.lines(states)
    assert len(read) == 1
    assert "jobs 0000, 0001, 0002, 0003, 0004 and 9995 more ran." in found[0]


def test_jobs_of_earlier_versions_have_recorded_nothing(package: Path) -> None:
    assert changes.lines({0: JobState("finished")}) == []
