"""Runs that are killed, and go on from their checkpoint in the same run of the tracker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.accel.trackers.offline import SECONDS, needs
from tests.helpers import ROOT, python


def run(folder: Path, *arguments: str, returncode: int = 0) -> str:
    """Run the script in `folder`, and return what it printed."""
    script = ROOT / "tests" / "accel" / "trackers" / "killed.py"
    own = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "TRACKIO_DIR": str(folder / "db")}
    done = subprocess.run(
        python(str(script), *arguments),
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout


def check(name: str, order: str, folder: Path) -> None:
    run(folder, name, "first", order, returncode=-signal.SIGKILL)
    run(folder, name, "second", order)
    found = json.loads(run(folder, name, "read").splitlines()[-1])
    assert found == [{"loss": list(range(8)), "late": list(range(8))}]


@needs("mlflow")
@pytest.mark.parametrize("order", ["load", "init"])
def test_mlflow_has_every_step_once_in_one_run(order: str, tmp_path: Path) -> None:
    check("mlflow", order, tmp_path)


@needs("trackio")
@pytest.mark.parametrize("order", ["load", "init"])
def test_trackio_has_every_step_once_in_one_run(order: str, tmp_path: Path) -> None:
    check("trackio", order, tmp_path)


@needs("dvclive")
@pytest.mark.parametrize("order", ["load", "init"])
def test_dvclive_has_every_step_once_in_one_folder(order: str, tmp_path: Path) -> None:
    check("dvclive", order, tmp_path)


@needs("wandb")
@pytest.mark.parametrize(("order", "last"), [("init", 2), ("load", 4)])
def test_wandb_has_on_disk_what_was_logged_before_a_state(
    order: str, last: int, tmp_path: Path
) -> None:
    run(tmp_path, "wandb", "first", order, returncode=-signal.SIGKILL)
    first = {"loss": list(range(last + 1)), "late": [0, 1, 2]}
    assert json.loads(run(tmp_path, "wandb", "read").splitlines()[-1]) == [first]
    run(tmp_path, "wandb", "third", order, returncode=-signal.SIGKILL)
    found = json.loads(run(tmp_path, "wandb", "read").splitlines()[-1])
    assert found == [first, {"loss": [3, 4, 5], "late": [3, 4, 5]}]
