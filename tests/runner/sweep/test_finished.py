"""A finished sweep that the same command finds without composing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import cli
from runner.recipe import hydra_setup
from runner.run_dir.directory import SWEEP
from runner.sweep import directory, finished, settings
from tests.runner.sweep.large import make_large

pytestmark = pytest.mark.usefixtures("elsewhere")
JOBS = 3


def found(*line: str) -> Path | None:
    """Return the finished sweep of a command line in this directory."""
    chosen, _ = settings.take(line)
    over = finished.find(line, hydra_setup.PRIMARY, chosen)
    return None if over is None else over[0].path


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    _, *overrides = make_large(tmp_path, JOBS)
    return overrides


def the_sweep(folder: Path) -> Path:
    (path,) = folder.glob("runs/digits/sweep-*")
    return path


def test_nothing_is_composed_for_a_finished_sweep(
    line: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was composed")

    monkeypatch.setattr(hydra_setup, "composed_with_hydra", fail)
    monkeypatch.setattr(hydra_setup, "chosen_files", fail)
    assert cli.main(["-m", *line]) == 0
    shown = capsys.readouterr().out
    assert "Nothing is left to do" in shown
    assert "best: job" in shown
    assert found(*reversed(line)) == the_sweep(tmp_path)


def copied(sweep: Path) -> None:
    shutil.copytree(sweep.parent, sweep.parent.with_name("zz"))
    shutil.rmtree(sweep)


def edited(sweep: Path) -> None:
    file = sweep.parents[2] / "conf" / "model" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("width: 3\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda sweep: shutil.rmtree(sweep / "0001"),
        lambda sweep: (sweep / "0001" / "config.yaml").unlink(),
        lambda sweep: (sweep / "journal.jsonl").unlink(),
        copied,
        edited,
    ],
    ids=["a-job-is-gone", "a-job-is-empty", "no-journal", "in-a-copy", "other-files"],
)
def test_what_is_not_the_same_is_composed(
    change: Callable[[Path], None], line: list[str], tmp_path: Path
) -> None:
    sweep = the_sweep(tmp_path)
    assert found(*line) == sweep
    change(sweep)
    assert found(*line) is None


def test_other_settings_are_composed_and_checked(line: list[str], tmp_path: Path) -> None:
    assert found(*line, "sweep.jobs=2") is None
    assert found(*line, "hydra/launcher=nope") is None
    assert found(*line[:-1]) is None
    assert found(*line, "sweep.list=[[seed=1]]") is None


def test_a_sweep_in_a_directory_that_was_chosen(line: list[str], tmp_path: Path) -> None:
    sweep = directory.read(the_sweep(tmp_path))
    mine = tmp_path / "mine"
    shutil.copytree(sweep.path, mine)
    text = (mine / SWEEP).read_text()
    given = '"sweep.dir=mine", "optimizer.lr=0.1"'
    (mine / SWEEP).write_text(text.replace('"optimizer.lr=0.1"', given, 1))
    there = directory.read(mine).description.overrides
    assert sorted(there) == sorted([*line, "sweep.dir=mine"])
    assert found(*there) == mine
    assert found(*line, "sweep.dir=yours") is None
    assert found("seed=1,2", "sweep.dir=mine") is None
