"""``runner -m``: begun, repeated, refused, concluded (S1, S2, S3)."""

from __future__ import annotations

import csv
import errno
import threading
from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from runner import cli
from runner.recipe.schema import Recipe
from runner.sweep import plan
from runner.sweep import sweep as sweeps
from tests.helpers import SECONDS, write_file
from tests.runner.sweep import stand_ins
from tests.runner.sweep.large import make_large
from tests.runner.sweep.stand_ins import StandIn
from tests.runner.sweep.test_sweep import described

pytestmark = pytest.mark.usefixtures("elsewhere")
LINE = ["-m", "seed=1,2,3", "optimizer.lr=0.5"]
WIDTH = "# @package _global_\nmodel:\n  width: {}\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


def the_sweep(folder: Path) -> Path:
    (found,) = folder.glob("runs/digits/sweep-*")
    return found


@pytest.mark.slow  # `test_kills.py` does it with kills
def test_the_same_command_again_trains_what_is_not_finished(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.codes = {1: 1, 2: 75}
    assert cli.main(LINE) == 1
    assert server.taken() == [0, 1, 2]
    server.codes = {1: 1}
    assert cli.main([*LINE, "sweep.jobs=2"]) == 1  # the same, with more at once
    assert server.taken() == [1, 2]
    server.codes = {}
    assert cli.main(LINE) == 0
    assert server.taken() == [1]
    capsys.readouterr()
    assert cli.main(LINE) == 0
    assert server.taken() == []
    assert "Nothing is left to do" in capsys.readouterr().out
    rows = list(csv.DictReader((the_sweep(tmp_path) / "results.csv").open()))
    assert {row["status"] for row in rows} == {"finished"}


@pytest.mark.slow
def test_a_changed_file_is_refused_with_the_difference(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path / "conf/experiment/own.yaml", WIDTH.format(4))
    line = [*LINE, "experiment=own"]
    server.codes = {1: 1}
    assert cli.main(line) == 1
    path.write_text(WIDTH.format(5))
    server.taken()
    assert cli.main(line) == 2
    assert server.taken() == []
    error = capsys.readouterr().err
    assert "model.width=5 in jobs 0, 1, 2: " in error
    assert "sweep.dir=" in error
    assert cli.main([*line, "sweep.dir=new"]) == 1
    assert server.taken() == [0, 1, 2]
    path.write_text("# @package _global_\nmodel:\n  width: 4\n# a remark\n")
    server.codes = {}
    assert cli.main(line) == 0  # the same recipe from another file
    assert server.taken() == [1]


def test_a_changed_file_of_another_folder_is_refused_too(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path / "others/experiment/own.yaml", WIDTH.format(4))
    (tmp_path / "others" / "named.yaml").write_text("defaults: [config, _self_]\n")
    line = ["--config-dir", "others", "--config-name", "named", *LINE, "experiment=own"]
    assert cli.main(line) == 0
    assert cli.main(line) == 0
    assert "Nothing is left to do" in capsys.readouterr().out
    path.write_text(WIDTH.format(5))
    assert cli.main(line) == 2
    assert "model.width=5 in jobs 0, 1, 2: " in capsys.readouterr().err
    assert server.taken() == [0, 1, 2]


@pytest.mark.slow
def test_a_recipe_that_reads_the_environment_is_composed_each_time(
    server: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WIDTH", "4")
    text = WIDTH.format("${oc.decode:${oc.env:WIDTH}}")
    write_file(tmp_path / "conf/experiment/own.yaml", text)
    line = [*LINE, "experiment=own"]
    assert cli.main(line) == 0
    monkeypatch.setenv("WIDTH", "8")
    assert cli.main(line) == 2
    assert "model.width=8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_list_of_jobs(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("- [seed=3, optimizer.lr=0.5]\n- [seed=4]\n")
    assert cli.main(["-m", "sweep.list=jobs.yaml", "model.width=4"]) == 0
    assert [(one.seed, one.model["width"]) for one in server.recipes] == [(3, 4), (4, 4)]
    (tmp_path / "jobs.yaml").write_text("- [seed=3, optimizer.lr=0.5]\n- [seed=5]\n")
    assert cli.main(["-m", "sweep.list=jobs.yaml", "model.width=4"]) == 2


def test_a_finished_sweep_is_told_by_composing_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = make_large(tmp_path, 3)
    composed: list[object] = []
    real = plan.composition.new_run
    counted = lambda *job: (composed.append(job), real(*job))[1]  # noqa: E731
    monkeypatch.setattr(plan.composition, "new_run", counted)
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert "Nothing is left to do" in shown
    assert "best: job 0002" in shown
    assert len(composed) == 1


def test_two_commands_that_begin_together_share_one_sweep(tmp_path: Path) -> None:
    made: list[Path] = []

    def create() -> None:
        made.append(sweeps.create(None, Recipe(), described(1, 2)).path)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(made) == 4
    assert len(set(made)) == 1


# -- the end of a command --------------------------------------------------------------------

TWO = ["-m", "seed=1,2", "optimizer.lr=0.5"]


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for the results, though not for the sweep's description."""
    real = checkpoints.write_atomically

    def full(path: Path, content: bytes) -> None:
        if path.name == "results.csv":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoints, "write_atomically", full)


@pytest.mark.parametrize("failed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_results_that_cannot_be_written_hide_no_table_and_no_failures(
    failed: bool,
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_room(monkeypatch)
    server.codes = {1: 2} if failed else {}
    assert cli.main(TWO) == 1
    shown = capsys.readouterr()
    assert "best: job 0000" in shown.out
    assert "Warning: results.csv is not written: the disk is full: [Errno 28]" in shown.err
    assert ("1 of 2 jobs failed: 0001" in shown.err) is failed
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("codes", "expected"), [({0: 75}, 75), ({0: 75, 1: 2}, 1), ({0: 130, 1: 1}, 1)]
)
def test_a_failed_job_is_hidden_by_no_other(
    codes: dict[int, int], expected: int, server: StandIn
) -> None:
    server.codes = codes
    assert cli.main(TWO) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_objective_that_is_no_number_is_no_success(
    value: float, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objectives = {0: value, 1: 0.5}
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(TWO) == 1
        shown = capsys.readouterr()
        assert "best: job 0001" in shown.out
        assert "1 of 2 jobs finished, but their objectives are no finite numbers" in shown.err
        assert "train them: 0000" in shown.err


@pytest.mark.slow
def test_where_nothing_has_changed_nothing_needs_to_be_written(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(TWO) == 0

    def cannot(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoints, "write_atomically", cannot)
    assert cli.main(TWO) == 0
    assert "Warning" not in capsys.readouterr().err
