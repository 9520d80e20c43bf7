"""How a failed process tells of its error (R9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError, MissingPackageError, Problem
from runner.launch import launcher, worker
from runner.runs import outcomes
from runner.runs.json_files import read_json

REFUSAL = ConfigError(Problem("optimizer.lr=-1", "it is above 0", "Set optimizer.lr=0.1."))


def raising(error: BaseException) -> Callable[..., int]:
    def run(*args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize("error", [REFUSAL, MissingPackageError("wandb", "tracker.log_with=wandb")])
def test_a_mistake_is_refused_without_a_traceback(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker, "run", raising(error))
    assert launcher.run_here(tmp_path) == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_an_error_shows_its_own_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run", raising(ValueError("wrong shape\nsecond line")))
    (tmp_path / "metrics.jsonl").touch()  # a step was made
    assert launcher.run_here(tmp_path) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "launch.py" not in printed
    assert "the run failed: ValueError: wrong shape\n" in printed
    assert str(tmp_path) in printed
    (kept,) = outcomes.read_outcomes(tmp_path)
    assert "second line" in kept.traceback
    assert read_json(tmp_path / "ended.json")["cause"]["message"] == kept.message


def test_control_c_tells_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run", raising(KeyboardInterrupt()))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    assert launcher.run_here(run_dir) == 130
    assert capsys.readouterr().err.startswith("Interrupted before the first checkpoint")
    (run_dir / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    assert launcher.run_here(run_dir) == 130
    assert capsys.readouterr().err.endswith(f"runner resume='{run_dir}'\n")
