"""S4: searches with Optuna, from a command line to the trials of a study and their report."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from optuna.trial import TrialState

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup
from runner.recipe.plugins import SearchConf
from runner.recipe.schema import Recipe
from runner.runs import lock
from runner.runs.json_files import METRICS, SUMMARY, SWEEP
from runner.sweep import sweep as sweeps
from runner.sweep.job import JobFailed, JobStopped
from runner.sweep.optuna.search import Search
from runner.sweep.optuna.settings import JOURNAL
from runner.sweep.optuna.space import Space
from runner.sweep.sweep import Sweep
from runner.training import optuna_study
from tests.helpers import python
from tests.runner.sweep.kills import killed_sweep
from tests.runner.sweep.stand_ins import begin_job, end_job
from tests.runner.sweep.test_kills import QUICK
from tests.runner.sweep.test_sweep import described

SPACE = ("optimizer.lr=tag(log, interval(1e-4,1e-1))", "seed=1,2")
STUDY = "s"
Objective = Callable[[int, dict[str, str]], Any]


class Launched(Launcher):
    """Ends the run of each job with the value of a function, and keeps the jobs' numbers."""

    def __init__(self, sweep: Sweep, objective: Objective) -> None:
        self.sweep, self.objective = sweep, objective
        self.batches: list[list[int]] = []

    def setup(self, **_: object) -> None:
        raise AssertionError("the search gets a launcher that is ready")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        numbers = [initial_job_idx + index for index in range(len(job_overrides))]
        self.batches.append(numbers)
        answers = []
        for number, overrides in zip(numbers, job_overrides, strict=True):
            given = dict(one.lstrip("+").split("=", 1) for one in overrides)
            answer = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
            session = begin_job(self.sweep.path, number, overrides)
            try:
                end_job(session, self.objective(number, given))
            except JobFailed as error:
                answer.return_value, answer.status = error, JobStatus.FAILED
            answers.append(answer)
        return answers


def sweep_in(folder: Path, settings: SearchConf) -> Sweep:
    """Return the sweep of a search in a folder, which an earlier call may have made."""
    if not (folder / SWEEP).exists():
        found: dict[str, Any] = {"storage": settings.storage or JOURNAL, "pruner": None}
        found |= {"study_name": settings.study_name or STUDY, "metrics": settings.metrics}
        found |= {"modes": [one[:3] for one in settings.direction] or ["min"]}
        there = replace(described(1), jobs=[], search=found, time=float(len(str(folder))))
        sweeps.create(str(folder), Recipe(), there)
    return sweeps.read(folder)


def search(folder: Path, objective: Objective, *space: str, **changes: Any) -> Launched:
    with hydra_setup.session():
        read = Space.read(space or SPACE, {}, {})
    settings = SearchConf(**{"n_trials": 6, **changes})
    sweep = sweep_in(folder, settings)
    launcher = Launched(sweep, objective)
    Search(settings, read, sweep, launcher).run()
    return launcher


def study_of(folder: Path) -> optuna.Study:
    storage = optuna_study.storage_of(JOURNAL, folder)
    name = sweeps.read(folder).description.search["study_name"]
    return optuna.load_study(study_name=name, storage=storage)


def report(folder: Path, number: int) -> None:
    """Report 0.25 at step 10 of a job, once."""
    study, storage = study_of(folder), optuna_study.storage_of(JOURNAL, folder)
    trial = optuna_study.trials_of(study)[number]
    if not trial.intermediate_values:
        optuna_study.running(study, storage, trial).report(0.25, 10)


def states(folder: Path) -> list[str]:
    newest = optuna_study.trials_of(study_of(folder))
    return [newest[number].state.name for number in sorted(newest)]


def distance(number: int, given: dict[str, str]) -> float:
    return abs(math.log10(float(given["optimizer.lr"])) + 2)


def test_jobs_go_to_the_launcher_in_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = search(tmp_path, distance, n_jobs=4)
    assert launched.batches == [[0, 1, 2, 3], [4, 5]]
    assert states(tmp_path) == ["COMPLETE"] * 6
    shown = capsys.readouterr().out
    assert "6 trials: 6 complete" in shown


def test_more_trials_go_on_with_the_study(tmp_path: Path) -> None:
    search(tmp_path, distance, n_trials=2)
    assert search(tmp_path, distance, n_trials=3).batches == [[2]]
    assert search(tmp_path, distance, n_trials=3).batches == []


def test_a_failed_job_stops_no_other_and_is_tried_again_once(tmp_path: Path) -> None:
    def failing(number: int, given: dict[str, str]) -> float:
        if number == 1:
            report(tmp_path, 1)
            raise JobFailed("job 0001 ended with exit code 1")
        return distance(number, given)

    assert search(tmp_path, failing).batches == [[n] for n in range(6)]
    assert states(tmp_path) == ["COMPLETE", "FAIL", *["COMPLETE"] * 4]
    assert search(tmp_path, failing).batches == [[1]]
    assert search(tmp_path, distance).batches == [[1]]
    assert states(tmp_path) == ["COMPLETE"] * 6
    first, *_, last = (one for one in study_of(tmp_path).trials if one.user_attrs["job"] == 1)
    assert (first.params, last.intermediate_values) == (last.params, {10: 0.25})


def test_an_objective_that_is_no_number_fails_for_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(tmp_path, lambda number, given: math.nan if number else math.inf, n_trials=2)
    assert states(tmp_path) == ["FAIL", "FAIL"]
    assert "trial 0: failed (an objective is no finite number: best inf)" in capsys.readouterr().out
    assert search(tmp_path, distance, n_trials=2).batches == []


def stopping_at(stopped: int) -> Objective:
    def stopping(number: int, given: dict[str, str]) -> float:
        if number == stopped:
            raise JobStopped(f"job {number:04} was stopped")
        return distance(number, given)

    return stopping


def test_an_interrupted_trial_goes_on_as_the_same_trial(tmp_path: Path) -> None:
    assert search(tmp_path, stopping_at(1)).batches == [[0], [1]]
    study = study_of(tmp_path)
    before = study.trials[1]
    assert before.state is TrialState.RUNNING
    report(tmp_path, 1)
    assert search(tmp_path, distance).batches == [[n] for n in range(1, 6)]
    after = study_of(tmp_path).trials
    assert (after[1].params, after[1].intermediate_values) == (before.params, {10: 0.25})
    assert [trial.user_attrs["job"] for trial in after] == list(range(6))


def test_a_trial_whose_run_is_being_trained_is_left_to_its_command(tmp_path: Path) -> None:
    search(tmp_path, stopping_at(1))
    with lock.held(tmp_path / "0001"):
        assert search(tmp_path, distance).batches == [[n] for n in range(2, 6)]
    assert search(tmp_path, distance).batches == [[1]]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runner.sweep.optuna.test_search import distance, search
def killing(number, given):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return distance(number, given)
search(Path(sys.argv[1]), killing)
"""


def test_a_search_that_was_killed_chooses_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    search(whole, distance)
    ended = subprocess.run(python("-c", KILLED, str(parts)), timeout=120, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    study_of(parts).ask()  # as by a command that is killed before it has a job
    assert search(parts, distance).batches == [[2], [3], [4], [5]]
    found = [optuna_study.trials_of(study_of(folder)) for folder in (whole, parts)]
    params = [[trials[number].params for number in sorted(trials)] for trials in found]
    assert params[0] == params[1]


@pytest.mark.parametrize("sampler", ["random", "qmc", "nsgaii", "cmaes"])
def test_each_sampler_draws_different_jobs(tmp_path: Path, sampler: str) -> None:
    space = ("optimizer.lr=interval(0,1)", "trainer.seed=range(1,9)")
    search(tmp_path, lambda number, given: 0.5 + number, *space, sampler=sampler, n_trials=5)
    assert len({str(trial.params) for trial in study_of(tmp_path).trials}) == 5


def test_no_job_starts_after_the_timeout(tmp_path: Path) -> None:
    assert len(search(tmp_path, distance, timeout=1e-9).batches) == 0
    assert len(search(tmp_path, distance, timeout=3600).batches) == 6


def measured(folder: Path, lacking: Sequence[int] = ()) -> Objective:
    """Return an objective whose runs measure the loss, but for the jobs that lack it."""

    def objective(number: int, given: dict[str, str]) -> None:
        rate = float(given["optimizer.lr"])
        found = {"accuracy": 1 / rate} | ({} if number in lacking else {"loss": rate})
        record = {"split": "validation", "step": 9, **found}
        (folder / f"{number:04}" / METRICS).write_text(json.dumps(record))

    return objective


def test_several_objectives_end_in_a_pareto_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, direction = ["validation/loss", "validation/accuracy"], ["minimize"] * 2
    search(tmp_path, measured(tmp_path), metrics=metrics, direction=direction)
    shown = capsys.readouterr().out
    assert shown.count("Pareto-optimal trial") == 6
    assert "python -m runner" in shown


def test_a_metric_that_is_not_measured_is_told_after_one_job(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="Did you mean 'validation/loss'"):
        search(tmp_path, measured(tmp_path), metrics=["validation/los"], direction=["minimize"])
    assert len(study_of(tmp_path).trials) == 1


LOSS = {"metrics": ["validation/loss"], "direction": ["minimize"]}


def test_a_job_without_the_objective_stops_no_other(tmp_path: Path) -> None:
    lacking = measured(tmp_path, lacking=[2])
    assert search(tmp_path, lacking, n_jobs=2, **LOSS).batches == [[0, 1], [2, 3], [4, 5]]
    assert states(tmp_path) == ["COMPLETE", "COMPLETE", "FAIL", *["COMPLETE"] * 3]
    assert search(tmp_path, lacking, **LOSS).batches == []  # the run is finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "steps", "kills", "longest"), [(4, 20, 1, 1.0), (20, 120, 3, 8.0)]
)
def test_a_search_with_pruning_that_is_killed_loses_and_doubles_no_trial(
    tmp_path: Path, count: int, steps: int, kills: int, longest: float
) -> None:
    line = (
        *(
            "hydra/sweeper=optuna",
            "optimizer.lr=tag(log,interval(1e-5,1.0))",
            *QUICK,
            "trainer.eval_every=5",
        ),
        *("hydra.sweeper.pruner={name: median, n_startup_trials: 2}", "trainer.eval_every=5"),
        *(f"hydra.sweeper.n_trials={count}", "sweep.jobs=2", f"trainer.max_steps={steps}"),
    )
    ended = killed_sweep(line, tmp_path, kills=kills, longest=longest)
    if ended.code:  # a job that was killed by itself is tried again by the next command
        ended = killed_sweep(line, tmp_path, kills=0, longest=0.0)
    assert ended.code == 0, ended.output
    for job in range(count):
        assert (ended.ends(job).count(0), ended.ends(job)[-1]) == (1, 0), ended.killed
    names = sorted(path.name for path in ended.folder.glob("[0-9]*"))
    assert names == [f"{job:04}" for job in range(count)]
    newest = optuna_study.trials_of(study_of(ended.folder))
    assert {trial.state.name for trial in newest.values()} <= {"COMPLETE", "PRUNED"}
    assert sorted(newest) == list(range(count))
    for number, trial in newest.items():
        summary = json.loads((ended.folder / f"{number:04}" / SUMMARY).read_text())
        assert summary["complete"] is True
        if trial.state is TrialState.COMPLETE:
            assert trial.value == summary["best"]["value"]
        else:
            assert summary["stopped"] == "pruned"


def test_a_study_of_another_sweep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"storage": str(tmp_path / "shared.journal"), "study_name": "t", "n_trials": 2}
    search(tmp_path / "a", distance, **shared)
    with pytest.raises(ConfigError, match="a study is of one sweep"):
        search(tmp_path / "longer", distance, **shared)
    assert search(tmp_path / "a", distance, **{**shared, "n_trials": 3}).batches == [[2]]


def test_a_study_that_was_lost_is_refused(tmp_path: Path) -> None:
    search(tmp_path, distance, n_trials=1)
    (tmp_path / JOURNAL).unlink()
    with pytest.raises(ConfigError, match=r"Restore it from a copy, .*sweep\.dir=DIR"):
        search(tmp_path, distance, n_trials=2)
    assert not (tmp_path / JOURNAL).exists()
