"""R7, R9: the budget of restarts, and what each attempt begins with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.launch import launcher
from runner.launch.failures import Ended
from runner.launch.group import Stops
from runner.recipe.schema import Distributed, Recipe
from runner.runs import sessions
from runner.runs.job import Job
from runner.runs.json_files import read_json
from runner.runs.outcomes import Outcome
from tests.runner.runs.test_directory import add_checkpoint

FAILED = Ended(1, Outcome(1, time.time(), 1, "ValueError: the cause"))


class Scripted:
    """Machines on which attempts end as given, without processes."""

    num_processes = 2

    def __init__(self, endings: Sequence[Ended | BaseException], stop: bool = False) -> None:
        self.endings, self.stop = list(endings), stop
        self.folders: list[Path] = []
        self.told: Ended | None = None

    def attempt(self, folder: Path, stops: Stops) -> Ended:
        self.folders.append(folder)
        assert Job.read(folder)[0].run_dir == sessions.run_dir_of(folder)
        if self.stop:
            stops.take(15)
        ending = self.endings.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    def finish(self, ended: Ended) -> None:
        self.told = ended


def train(run_dir: Path, machines: Scripted, max_restarts: int) -> int:
    recipe = Recipe(distributed=Distributed(kind="multi_cpu", max_restarts=max_restarts))
    return launcher.train(machines, Job(run_dir).save(recipe), recipe, 2)


def codes(run_dir: Path) -> list[int]:
    return [read_json(one / "ended.json")["code"] for one in sessions.of_run(run_dir)]


def test_a_failure_starts_again_within_the_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machines = Scripted([FAILED, FAILED, Ended(0)])
    assert train(tmp_path, machines, 2) == 0
    printed = capfd.readouterr().err
    assert "session 0001 failed; restart 1 of 2 goes on from the beginning" in printed
    assert "session 0002 failed; restart 2 of 2 goes on from the beginning" in printed
    assert "session 0001 failed; restart 1 of 2" in (tmp_path / "run.log").read_text()
    assert codes(tmp_path) == [1, 1, 0]
    assert launcher.restarts_used(tmp_path) == 2
    assert machines.told == Ended(0)


def test_the_budget_is_of_the_whole_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, Scripted([FAILED, Ended(75)]), 1) == 75
    machines = Scripted([FAILED])
    assert train(tmp_path, machines, 1) == 1
    told = (
        "session 0003 failed: distributed.max_restarts=1 are used up over the whole run, and there"
    )
    assert f"{told} is no complete checkpoint" in capfd.readouterr().err
    assert codes(tmp_path) == [1, 75, 1]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Ended(2, Outcome(0, 0.0, 2, "model.width=0: refused")), 2),
        (Ended(75), 75),
        (KeyboardInterrupt(), 130),
        (Ended(130, Outcome(1, 0.0, 130, "it was interrupted")), 130),
    ],
)
def test_other_ends_are_final(ending: Ended | BaseException, code: int, tmp_path: Path) -> None:
    machines = Scripted([ending])
    assert train(tmp_path, machines, 3) == code
    assert codes(tmp_path) == [code]
    assert machines.told is not None
    assert machines.told.code == code


def test_a_requested_stop_is_final(tmp_path: Path) -> None:
    assert train(tmp_path, Scripted([FAILED], stop=True), 3) == 1
    assert codes(tmp_path) == [1]


def test_a_restart_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    failed = Job(tmp_path, overrides=("seed=0",)).save(Recipe())
    state = add_checkpoint(tmp_path / "checkpoints", 3)
    again = launcher._again(failed, Recipe())
    assert (again.place.name, again.resume_from, again.overrides) == (
        "0002",
        str(state),
        ("seed=0",),
    )
    assert launcher._origin(again) == "checkpoints/checkpoint_3"
    assert launcher.restarts_used(tmp_path) == 1


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    failed = Job(tmp_path, resume_from="gone").save(Recipe())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    again = launcher._again(failed, Recipe())
    assert again.resume_from is None
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (failed.place / "metrics.jsonl").exists()
    assert launcher._origin(again).startswith("the beginning")
