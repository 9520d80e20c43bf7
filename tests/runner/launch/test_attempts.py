"""The budget of restarts, and what each attempt begins with (R9)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runner.launch import attempts
from runner.launch.attempt import Ended
from runner.launch.worker_group import StopSignals
from runner.recipe.schema import Distributed, Recipe
from runner.run_dir import outcomes
from runner.run_dir.job import Job
from runner.run_dir.outcomes import Outcome

FAILED = Ended(1, Outcome(1, time.time(), 1, "ValueError: the cause"))


class Scripted:
    """Machines on which attempts end as given, without processes."""

    num_processes = 2

    def __init__(self, endings: Sequence[Ended | BaseException], stop: bool = False) -> None:
        self.endings, self.stop = list(endings), stop
        self.folders: list[Path] = []
        self.told: Ended | None = None

    def attempt(self, folder: Path, stops: StopSignals) -> Ended:
        self.folders.append(folder)
        assert Job.read(folder)[0].run_dir == folder
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
    job = Job(run_dir)
    if not (run_dir / "job.json").exists():
        job.save(recipe)
    return attempts.train(machines, replace(job), recipe, 2)


def test_a_failure_starts_again_within_the_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machines = Scripted([FAILED, FAILED, Ended(0)])
    assert train(tmp_path, machines, 2) == 0
    printed = capfd.readouterr().err
    assert "attempt 1 failed; restart 1 of 2 goes on from the beginning" in printed
    assert "attempt 2 failed; restart 2 of 2 goes on from the beginning" in printed
    kept = tmp_path / "logs" / "attempt_2" / "run.log"
    assert "attempt 1 failed; restart 1 of 2" in kept.read_text()
    assert (tmp_path / "logs" / "attempt_2" / "config.yaml").exists()
    assert outcomes.restarts_used(tmp_path) == 2
    assert machines.told == Ended(0)


def test_the_budget_is_of_the_whole_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, Scripted([FAILED, Ended(75)]), 1) == 75
    machines = Scripted([FAILED])
    assert train(tmp_path, machines, 1) == 1
    told = (
        "attempt 2 failed: distributed.max_restarts=1 are used up over the whole run, and there is"
    )
    assert f"{told} no complete checkpoint" in capfd.readouterr().err
    assert [attempt.restarted for attempt in outcomes.read_failed(tmp_path)] == [True, False]


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
    assert outcomes.read_failed(tmp_path) == []
    assert machines.told is not None
    assert machines.told.code == code


def test_a_requested_stop_is_final(tmp_path: Path) -> None:
    assert train(tmp_path, Scripted([FAILED], stop=True), 3) == 1
    assert outcomes.read_failed(tmp_path) == []
