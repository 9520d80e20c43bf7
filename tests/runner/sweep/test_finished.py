"""S1: a finished sweep is told without composing, as long as nothing of it has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import cli
from runner.recipe import hydra_setup
from runner.sweep import directory, finished, settings
from tests.runner.sweep.large import make_large

pytestmark = pytest.mark.usefixtures("elsewhere")
JOBS = 3


def found(*line: str) -> Path | None:
    """Return the finished sweep of a command line in this directory."""
    chosen, _ = settings.take(line)
    over = finished.find(line, hydra_setup.PRIMARY, chosen)
    return None if over is None else over.path


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
        copied,
        edited,
    ],
    ids=["a-run-removed", "in-a-copy", "other-files"],
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


# -- what recipes are composed from ------------------------------------------------------


def fingerprint(*overrides: str) -> str | None:
    with hydra_setup.session(overrides):
        return finished.fingerprint()


def test_a_fingerprint_is_of_every_file_of_recipes(tmp_path: Path) -> None:
    shipped = fingerprint()
    assert shipped is not None
    file = tmp_path / "conf" / "model" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("width: 4\n")
    first = fingerprint()
    file.write_text("width: 5\n")
    second = fingerprint()
    file.rename(file.with_name("other.yaml"))
    third = fingerprint()
    assert None not in (first, second, third)
    assert len({shipped, first, second, third}) == 4
    file.with_name("notes.txt").write_text("no recipe")
    assert fingerprint() == third


def test_a_folder_of_the_command_line_is_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "others" / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("seed: 4\n")
    searched = f"hydra.searchpath=['file://{folder.parent}']"
    first = fingerprint(searched)
    assert None is not first != fingerprint()
    (folder / "own.yaml").write_text("seed: 5\n")
    assert None is not fingerprint(searched) != first


@pytest.mark.parametrize("value", ["${oc.env:WIDTH}", "${oc.decode:${oc.env:WIDTH}}"])
def test_values_from_elsewhere_have_no_fingerprint(value: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("name: ${model.width}\n")
    assert fingerprint() is not None
    (tmp_path / "conf" / "mine.yaml").write_text(f"name: {value}\n")
    assert fingerprint() is None


def test_a_sweep_of_another_version_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(tmp_path, 1)
    (path,) = tmp_path.glob("runs/digits/sweep-*")
    there, here = directory.read(path).description, fingerprint()
    assert finished.are_of(there, here)
    assert not finished.are_of(there, None)
    assert not finished.are_of(there, "0" * 64)
    monkeypatch.setattr(finished, "version", lambda: "0.0.1")
    assert not finished.are_of(there, here)
