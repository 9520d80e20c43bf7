"""``runner -m``: begun, repeated, refused, concluded (S1)."""

from __future__ import annotations

import csv
import os
import subprocess
import threading
from pathlib import Path

import pytest

from runner import cli
from runner.recipe import composition
from runner.sweep import command, directory
from tests.helpers import SECONDS, python
from tests.runner.sweep import stand_ins
from tests.runner.sweep.large import make_large
from tests.runner.sweep.stand_ins import StandIn

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("elsewhere")
LINE = ["-m", "seed=1,2,3", "optimizer.lr=0.5"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


def numbers(server: StandIn) -> list[int]:
    found = [order.number for order in server.orders]
    server.orders.clear()
    return found


def the_sweep(folder: Path) -> Path:
    (found,) = folder.glob("runs/digits/sweep-*")
    return found


@pytest.mark.slow  # `test_kills.py` does it with kills
def test_the_same_command_again_trains_what_is_not_finished(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.codes = {1: 1, 2: 75}
    assert cli.main(LINE) == 1
    assert numbers(server) == [0, 1, 2]
    server.codes = {1: 1}
    assert cli.main([*LINE, "sweep.jobs=2"]) == 1  # the same, with more at once
    assert numbers(server) == [1, 2]
    server.codes = {}
    assert cli.main(["-m", "optimizer.lr=0.5", "seed=1,2,3"]) == 0
    assert numbers(server) == [1]
    capsys.readouterr()
    assert cli.main(LINE) == 0
    assert numbers(server) == []
    assert "Nothing is left to do" in capsys.readouterr().out
    rows = list(csv.DictReader((the_sweep(tmp_path) / "results.csv").open()))
    assert [row["attempts"] for row in rows] == ["1", "3", "2"]
    assert {row["status"] for row in rows} == {"finished"}


@pytest.mark.slow
def test_a_sweep_goes_on_with_its_keys_in_another_order(server: StandIn) -> None:
    server.codes = {1: 1}
    assert cli.main(["-m", "seed=1,2", "hydra/launcher=basic", "optimizer.lr=0.5"]) == 1
    server.codes = {}
    numbers(server)
    assert cli.main(["-m", "optimizer.lr=0.5", "sweep.jobs=2", "seed=1,2"]) == 0
    assert numbers(server) == [1]


@pytest.mark.slow
def test_a_repeated_command_composes_one_job(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.codes = {1: 1}
    cli.main(LINE)
    composed = []
    real = composition.new_run

    def count(overrides: list[str], name: str, number: int = 0) -> composition.Examined:
        composed.append(overrides)
        return real(overrides, name, number)

    monkeypatch.setattr(composition, "new_run", count)
    server.codes = {}
    numbers(server)
    assert cli.main(LINE) == 0
    assert numbers(server) == [1]
    assert len(composed) == 1


@pytest.mark.slow
def test_a_changed_file_is_refused_with_the_difference(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "conf" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nmodel:\n  width: 4\n")
    line = [*LINE, "experiment=own"]
    server.codes = {1: 1}
    assert cli.main(line) == 1
    path.write_text("# @package _global_\nmodel:\n  width: 5\n")
    numbers(server)
    assert cli.main(line) == 2
    assert numbers(server) == []
    error = capsys.readouterr().err
    assert "model.width=5 in jobs 0, 1, 2: model.width=4 in" in error
    assert "sweep.dir=" in error
    assert cli.main([*line, "sweep.dir=new"]) == 1
    assert numbers(server) == [0, 1, 2]
    path.write_text("# @package _global_\nmodel:\n  width: 4\n# a remark\n")
    server.codes = {}
    assert cli.main(line) == 0  # the same recipe from another file
    assert numbers(server) == [1]


def test_a_changed_file_of_another_folder_is_refused_too(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "others" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nmodel:\n  width: 4\n")
    line = ["--config-dir", "others", *LINE, "experiment=own"]
    assert cli.main(line) == 0
    assert cli.main(line) == 0
    assert "Nothing is left to do" in capsys.readouterr().out
    path.write_text("# @package _global_\nmodel:\n  width: 5\n")
    assert cli.main(line) == 2
    assert "model.width=5 in jobs 0, 1, 2: model.width=4 in" in capsys.readouterr().err
    assert numbers(server) == [0, 1, 2]


@pytest.mark.slow
def test_a_recipe_that_reads_the_environment_is_composed_each_time(
    server: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WIDTH", "4")
    path = tmp_path / "conf" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nmodel:\n  width: ${oc.decode:${oc.env:WIDTH}}\n")
    line = [*LINE, "experiment=own"]
    assert cli.main(line) == 0
    monkeypatch.setenv("WIDTH", "8")
    assert cli.main(line) == 2
    assert "model.width=8" in capsys.readouterr().err


def test_a_list_of_jobs_that_reads_the_environment_is_composed_each_time(
    server: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "jobs.yaml").write_text("- ['model.width=\"${oc.decode:${oc.env:WIDTH}}\"']\n")
    line = ["-m", "sweep.list=jobs.yaml", "sweep.dir=mine"]
    monkeypatch.setenv("WIDTH", "4")
    assert cli.main(line) == 0
    monkeypatch.setenv("WIDTH", "8")
    assert cli.main(line) == 2
    assert "model.width=8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_directory_that_is_chosen(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*LINE, "sweep.dir=mine"]) == 0
    assert directory.read(tmp_path / "mine").description.config_name == "config"
    assert not (tmp_path / "runs").exists()
    assert cli.main(["-m", "seed=7,8", "sweep.dir=mine"]) == 2
    assert "holds another sweep (seed=1,2,3 optimizer.lr=0.5)" in capsys.readouterr().err


@pytest.mark.slow
def test_other_overrides_are_another_sweep(server: StandIn, tmp_path: Path) -> None:
    assert cli.main(LINE) == 0
    assert cli.main(["-m", "seed=1,2", "optimizer.lr=0.5"]) == 0
    assert len(list(tmp_path.glob("runs/digits/sweep-*"))) == 2


@pytest.mark.slow
def test_a_list_of_jobs(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("seed=3 optimizer.lr=0.5\nseed=4\n")
    assert cli.main(["-m", "sweep.list=jobs.txt", "model.width=4"]) == 0
    assert [(one.seed, one.model["width"]) for one in server.recipes] == [(3, 4), (4, 4)]
    (tmp_path / "jobs.txt").write_text("seed=3 optimizer.lr=0.5\nseed=5\n")
    assert cli.main(["-m", "sweep.list=jobs.txt", "model.width=4"]) == 2


def test_a_full_disk_is_told_before_anything_is_started(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accel.checkpoint import directory as checkpoints

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_atomically", full)
    assert cli.main(LINE) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert numbers(server) == []


def test_two_commands_that_begin_together_share_one_sweep(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = command.Request.of(LINE[1:], "config")
    examined = command.examine(request, lambda _: None)
    described = command._described(
        request, command.jobs.Choice("basic", "basic"), examined, "abcd1234", None
    )
    made: list[Path] = []

    def create() -> None:
        made.append(directory.create(None, examined[0].recipe, described).path)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(made) == 4
    assert len(set(made)) == 1


COUNTED = """
import sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from runner import cli
code = cli.main(sys.argv[2:])
inside = [path for path in opened if sys.argv[1] in path]
print(code, len(inside), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_large_sweep_is_repeated_by_reading_few_files(tmp_path: Path) -> None:
    line = make_large(tmp_path, 10_000)
    ended = subprocess.run(
        python("-c", COUNTED, "/sweep-", *line),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    code, num_files, has_torch = ended.stdout.splitlines()[-1].split()
    assert (code, has_torch) == ("0", "False"), ended.stderr
    assert int(num_files) < 12  # the description, the journal, the table
    assert len((the_sweep(tmp_path) / "results.csv").read_text().splitlines()) == 10_001


def test_jobs_are_listed_with_what_differs() -> None:
    request = command.Request.of(["seed=1,2", "scheduler=null"], "config")
    lines = command.listing(command.examine(request, lambda _: None))
    assert lines == ["2 jobs; all have: scheduler=null", "0000  seed=1", "0001  seed=2"]
