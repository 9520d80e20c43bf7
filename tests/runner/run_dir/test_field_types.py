"""Files of a run that are valid JSON with values of other types: each command shows all runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.run_dir import field_types
from tests.runner.written_runs import STARTED, write, write_failure, write_run

pytestmark = pytest.mark.usefixtures("elsewhere")
REPLACEMENTS = (3, "x", [1, "a"], None, {"a": 1}, 10**400, float("nan"))
LONG = ("summary.json", "environment.json", "job.json", "metrics.jsonl", "eval.json")
FILES = (
    *("checkpoints/best.json", "logs/launch_1_rank_0.json", "slurm.json"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in LONG),
)
OF_FINISHED_RUNS = ("summary.json", "environment.json", "job.json", "eval.json")
GIT = {"sha": "a" * 40, "branch": "main", "dirty": True, "diff_sha256": "b" * 64, "untracked": []}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file that these commands read."""
    path = write_run(tmp_path_factory.mktemp("whole") / "run", {"tags": ["x"]}, metrics=2, git=GIT)
    environment = json.loads((path / "environment.json").read_text())
    data = {"data.path": {"path": "/x", "files": 1, "bytes": 2, "newest": 3.0, "complete": True}}
    more = {"device": {"type": "cuda", "count": 1}, "code": {"own": "c" * 64}, "data": data}
    write(path / "environment.json", {**environment, **more, "runner_git": GIT})
    evaluation = {"checkpoint": "checkpoint_0", "step": 1, "overrides": [], "time": "2026-01-01"}
    found = [{**evaluation, "metrics": {"test": {"loss": 1.0}}}]
    write(path / "eval.json", {"evaluations": found})
    best = {"checkpoint": "checkpoint_0", "step": 1, "metric": "loss", "value": 0.5}
    write(path / "checkpoints" / "best.json", best)
    write(path / "slurm.json", {"job": "7", "time": 1.0, "host": "a"})
    write_failure(path, STARTED + 1)
    return path


def variants(value: Any, at: int = 0) -> Iterator[Any]:
    """Yield a value with each of its parts, and itself, replaced by values of two other types."""
    for shift in (0, 1):
        yield REPLACEMENTS[(2 * at + shift) % len(REPLACEMENTS)]
    keys = value if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    for number, key in enumerate(keys):
        for inner in variants(value[key], at + number + 1):
            changed = deepcopy(value)
            changed[key] = inner
            yield changed


@pytest.mark.parametrize("name", FILES)
def test_no_type_of_any_field_keeps_a_command_from_the_other_runs(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(whole, runs / "good")
    lines = (whole / name).read_text().splitlines()
    content = json.loads(lines[-1])
    for number, changed in enumerate(variants(content)):
        run = runs / f"bad-{number:04}"
        shutil.copytree(whole, run)
        (run / name).write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
        if name not in OF_FINISHED_RUNS:
            (run / "summary.json").unlink()
    for command in (["list"], ["show"], ["compare"], ["report", "--terminal"]):
        assert cli.main([*command, str(runs)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["list", str(runs), "--json"]) == 0
    listed = json.loads(_out(capsys))
    assert len(listed) == number + 2
    damaged = [one for one in listed if any(name in problem for problem in one["problems"])]
    assert len(damaged) >= 2 or name == "slurm.json"


def test_a_summary_of_the_wrong_shape_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(whole, runs / "good")
    bad = runs / "bad"
    shutil.copytree(whole, bad)
    write(bad / "summary.json", {"best": 3})
    assert cli.main(["list", str(runs), "--json"]) == 0
    problems = {Path(one["directory"]).name: one["problems"] for one in json.loads(_out(capsys))}
    assert problems == {
        "good": [],
        "bad": ["summary.json is damaged (wrong value at best)"],
    }


def test_what_does_not_fit_is_left_out_and_named_by_its_key() -> None:
    value = {"step": True, "metrics": {"a": {"loss": "NaN", "acc": None}}, "mine": [1], "name": 3}
    fitted, problem = field_types.fitted(value, field_types.SUMMARY)
    assert str(fitted) == "{'metrics': {'a': {'loss': nan}}, 'mine': [1]}"
    assert problem == "wrong value at step, metrics.a.acc, name"
    assert field_types.fitted([1], field_types.SUMMARY) == ({}, "it is no mapping")


def _out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out
