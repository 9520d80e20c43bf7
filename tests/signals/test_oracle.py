"""R3, R9, R10: the oracle of the matrix notices a run that ended in another way."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from accel.checkpoint import directory
from runner.recipe import serialization
from runner.runs.job import Job
from tests.runner.written_runs import session_of
from tests.signals import oracle
from tests.signals.cells import Cell, Run
from tests.signals.oracle import Expected, Result, Resumed, State

TERM = Expected(75, saves=True, resumes=True, workers=2)
INT = Expected(130, saves=False, every_steps=2, workers=0)


def write(run_dir: Path, steps: tuple[int, ...], rows: int) -> Path:
    """Write a run directory with the checkpoints of `steps` and so many rows."""
    run_dir.mkdir(exist_ok=True)
    Job(run_dir).save(serialization.from_plain({"name": "faked"}))
    for number, step in enumerate(steps):
        final = run_dir / "checkpoints" / f"checkpoint_{number}"
        final.parent.mkdir(exist_ok=True)
        staged = directory.stage(final)
        (staged / "model.safetensors").write_bytes(bytes(64))
        directory.seal(staged, {}, {"step": step})
        directory.publish(staged, final)
    lines = [json.dumps({"step": step, "split": "train"}) for step in range(1, rows + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


@pytest.fixture(autouse=True)
def _no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is to outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda target: None)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "run", (3,), 3)


def saved(run_dir: Path) -> Result:
    """Return what TERM in step 3 leaves in `run_dir`."""
    resumed = Resumed(0, ((4,), (4,)), State((3, 4), (), (1, 2, 3, 4)))
    steps = ((1, 2, 3), (1, 2, 3))
    return Result(75, steps, State(), State.read(run_dir), (), 1.0, (2, 2), resumed=resumed)


def interrupted(run_dir: Path) -> Result:
    """Return what INT in step 3 leaves in `run_dir`, where the state of step 2 was saved."""
    before = State((2,), (), (1, 2))
    return Result(130, ((1, 2),), before, State.read(run_dir), (), 1.0, (0,))


def told(result: Result, expected: Expected) -> str:
    return "\n".join(result.problems(expected))


def test_what_is_expected_is_no_problem(run_dir: Path, tmp_path: Path) -> None:
    assert saved(run_dir).problems(TERM) == []
    assert interrupted(write(tmp_path / "other", (2,), 2)).problems(INT) == []


@pytest.mark.parametrize("name", ["config.yaml", "job.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_damaged_file_is_told(run_dir: Path, name: str, damage: str) -> None:
    path = run_dir / name if name == "metrics.jsonl" else session_of(run_dir) / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-7] if damage == "cut" else b"a: [1\n{" + whole)
    expected = "rows of the steps none" if (name, damage) == ("metrics.jsonl", "gone") else ""
    assert (expected or "not resumable: ") in told(saved(run_dir), TERM)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"code": 1}, "exit code 1, not 75"),
        ({"orphans": ("17 python",)}, "orphan: 17 python"),
        ({"seconds": oracle.LIMIT_SECONDS + 1}, "it took 61 seconds"),
        ({"workers": (2, 0)}, "loader workers of the ranks: (2, 0), not 2"),
        ({"workers": ()}, "no rank has loader workers"),
        ({"mishaps": ("there is nobody to strike",)}, "there is nobody to strike"),
    ],
)
def test_processes_that_are_not_as_expected_are_told(
    run_dir: Path, change: dict, problem: str
) -> None:
    assert told(saved(run_dir).with_(**change), TERM).startswith(problem)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit(75)", "the phase was not reached: it ended before, with 75"),
        ("WAIT", "there is nobody to strike"),
    ],
)
def test_a_cell_that_strikes_nobody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    """The run is a stand-in: it ends at once, or waits in the phase and has no loader workers."""
    if code == "WAIT":
        code = (
            "import os, pathlib, time\n"
            f"place = pathlib.Path({str(tmp_path)!r})\n"
            "(place / 'steps_0').write_text(f'{os.getpid()} 1\\n')\n"
            "(place / 'partial').write_text(str(os.getpid()))\n"
            "(place / 'partial').rename(place / 'training_0')\n"
            "while not (place / 'go').exists(): time.sleep(0.01)\n"
            "raise SystemExit(75)\n"
        )
    monkeypatch.setattr("tests.signals.cells.COMMAND", code)
    monkeypatch.setattr("tests.signals.cells.WORKERS_SECONDS", 0.2)
    cell = Cell(signal.SIGTERM, "loader", True, "training", 1)
    assert problem in Run(cell, tmp_path).result().problems(cell.expected)
