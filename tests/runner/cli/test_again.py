"""`runner again`: the same run from its frozen recipe, and what is not the same (L1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.machine import env
from runner import cli
from runner.launch import start_run
from runner.recipe import processes
from runner.recipe.processes import Adopted
from tests import commands
from tests.helpers import git, with_path
from tests.runner.written_runs import session_of, write_run, write_sweep

SHORT = ("trainer.max_steps=3", "tracker.log_with=[]", "trainer.limit_eval_batches=1")


def run(*arguments: str, cwd: Path) -> str:
    answer = commands.run("-m", "runner", *arguments, cwd=cwd, environment=with_path())
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def weights(run_dir: Path) -> str:
    (manifest,) = run_dir.glob("checkpoints/*/manifest.json")
    return str(json.loads(manifest.read_text())["files"]["model.safetensors"]["sha256"])


@pytest.mark.slow  # it trains twice in processes of their own
def test_the_same_code_gives_the_same_bits_also_from_a_dirty_work_tree(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("runs\n")
    (tmp_path / "notes.txt").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    run(*SHORT, "seed=3", cwd=tmp_path)
    (first,) = (tmp_path / "runs" / "digits").iterdir()
    (tmp_path / "notes.txt").write_text("2")
    told = run("again", str(first), "tags=[other]", cwd=tmp_path)
    second = next(path for path in (tmp_path / "runs" / "digits").iterdir() if path != first)
    assert weights(first) == weights(second)
    assert f"weights at step 3: bit-equal to those of digits/{first.name}" in told
    assert "had no uncommitted changes, and has uncommitted changes" in told
    assert (second / "sessions" / "0001" / "git.diff").is_file()
    recipes = [yaml.safe_load((one / "config.yaml").read_text()) for one in (first, second)]
    assert [one.pop("tags") for one in recipes] == [[], ["other"]]
    assert recipes[0] == recipes[1]
    log = (second / "run.log").read_text()
    assert "validation" in log
    assert "\x1b" not in log


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, elsewhere: None) -> list[Any]:
    """Record jobs in place of starting them."""
    jobs: list[Any] = []

    def record(examined: Any, **_: Any) -> int:
        jobs.append((examined.recipe, examined.overrides, env.read("OMP_NUM_THREADS")))
        return 0

    monkeypatch.setattr(start_run, "start", record)
    return jobs


def test_the_frozen_recipe_is_run_with_its_limits(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"trainer.stop_after": 7, "optimizer.lr": 0.25, "seed": 5}
    path = write_run(tmp_path / "a", values)
    file = session_of(path) / "threads.json"
    file.write_text('{"num_threads": 3, "deterministic": false}')
    assert cli.main(["again", str(path)]) == 0
    ((recipe, _, threads),) = started
    assert (recipe.trainer.stop_after, recipe.optimizer["lr"], recipe.seed) == (7, 0.25, 5)
    assert recipe.resume is None
    assert threads == "3"
    out = capsys.readouterr().out
    assert "torch was 2.13.0, and is" in out
    assert "data       as recorded" in out


def test_overrides_change_it_even_where_a_resume_could_not(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a", {"optimizer.lr": 0.25})
    assert cli.main(["again", str(path), "seed=9", "optimizer=sgd"]) == 0
    ((recipe, overrides, *_),) = started
    assert (recipe.seed, "momentum" in recipe.optimizer) == (9, True)
    assert {"seed=9", "optimizer=sgd"} <= set(overrides)
    assert "overrides  seed=9 optimizer=sgd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resume=auto",), "a run that is made again is a new one"),
        (("optimzer.lr=1",), "Did you mean 'optimizer.lr'"),
        (("model.widht=1",), "width"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    started: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run(tmp_path / "a")
    assert cli.main(["again", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dry_run_on_processes_of_a_launcher_ends_on_each(
    rank: int,
    started: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(processes, "adopted", lambda: Adopted(rank, 0, 2, 1))
    assert cli.main(["again", str(write_run(tmp_path / "a")), "--dry-run"]) == 0
    assert ("again: " in capsys.readouterr().out) is (rank == 0)
    assert started == []


def test_a_broken_run_is_refused(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "20260101-120000-aaaa"
    path.mkdir()
    assert cli.main(["again", str(path)]) == 2
    assert "it is no run directory" in capsys.readouterr().err


def test_one_run_is_made_again(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["again", "A", "-m", "seed=0,1"]) == 2
    capsys.readouterr()
    assert cli.main(["again", str(write_sweep(tmp_path, (1e-3,)))]) == 2
    assert "holds 4" in capsys.readouterr().err
    assert started == []
