"""S4: searches with Optuna, from a command line to the trials of a study and their report."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from optuna.trial import TrialState
from rich.console import Console

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup, sweepers
from runner.runs import sessions
from runner.runs import study as study_files
from runner.runs.json_files import SUMMARY
from runner.sweep import optuna_sweeper
from runner.sweep.optuna_sweeper import STUDY, Search
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.sweep.task import JobFailed, JobStopped
from runner.training import optuna_study
from tests.runner.sweep.kills import killed_sweep
from tests.runner.written_runs import session_of, write_run, write_session

SPACE = ("optimizer.lr=tag(log, interval(1e-4,1e-1))", "seed=1,2")
Objective = Callable[[int, dict[str, str]], Any]
QUICK = (
    *("tracker.log_with=[]", "data.augment=false", "checkpoint.every_steps=5", "model.width=4"),
    *("trainer.epochs=null", "trainer.log_every=5", "trainer.eval_every=5"),
)


class Launched(Launcher):
    """Calls a function with number and overrides of each job, and keeps the numbers."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
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
            try:
                answer.return_value = self.objective(number, given)
            except JobFailed as error:
                answer.return_value, answer.status = error, JobStatus.FAILED
            answers.append(answer)
        return answers


def search(
    folder: Path,
    objective: Objective,
    *space: str,
    config_name: str = "config",
    **changes: object,
) -> Launched:
    launcher = Launched(objective)
    with hydra_setup.session():
        read = Space.read(space or SPACE, {}, {})
    settings = Settings.read({**sweepers.DEFAULTS, "n_trials": 6, **changes})
    Search(settings, read, folder, config_name, launcher).run()
    return launcher


def study_of(folder: Path) -> optuna.Study:
    storage = optuna_study.storage_of(study_files.JOURNAL, folder)
    return optuna.load_study(study_name=STUDY, storage=storage)


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
    assert f"best trial {study_of(tmp_path).best_trial.number}: best" in shown


def test_more_trials_go_on_with_the_study(tmp_path: Path) -> None:
    search(tmp_path, distance, n_trials=2)
    assert search(tmp_path, distance, n_trials=3).batches == [[2]]
    assert search(tmp_path, distance, n_trials=3).batches == []


def test_a_failed_job_stops_no_other_and_is_tried_again_once(tmp_path: Path) -> None:
    def failing(number: int, given: dict[str, str]) -> float:
        if number == 1:
            raise JobFailed("job 0001 ended with exit code 1")
        return distance(number, given)

    assert search(tmp_path, failing).batches == [[n] for n in range(6)]
    assert states(tmp_path) == ["COMPLETE", "FAIL", *["COMPLETE"] * 4]
    assert search(tmp_path, distance).batches == [[1]]
    assert states(tmp_path) == ["COMPLETE"] * 6


def test_an_objective_that_is_no_number_fails_with_the_reason(tmp_path: Path) -> None:
    search(tmp_path, lambda number, given: math.nan if number else math.inf, n_trials=2)
    assert states(tmp_path) == ["FAIL", "FAIL"]
    reasons = [trial.user_attrs["failure"]["reason"] for trial in study_of(tmp_path).trials]
    assert reasons == [f"an objective is no finite number: best {x}" for x in ("inf", "nan")]
    assert search(tmp_path, distance, n_trials=2).batches == []


def test_a_stopped_job_keeps_its_trial(tmp_path: Path) -> None:
    def stopping(number: int, given: dict[str, str]) -> float:
        if number == 1:
            raise JobStopped("job 0001 was stopped")
        return distance(number, given)

    assert search(tmp_path, stopping).batches == [[0], [1]]
    before = study_of(tmp_path).trials[1]
    assert before.state is TrialState.RUNNING
    assert search(tmp_path, distance).batches == [[n] for n in range(1, 6)]
    assert study_of(tmp_path).trials[1].params == before.params
    assert len(study_of(tmp_path).trials) == 6


def test_too_many_failures_end_the_search(tmp_path: Path) -> None:
    def failing(number: int, given: dict[str, str]) -> float:
        raise JobFailed("it broke")

    with pytest.raises(JobFailed, match=r"1 of 1 jobs have failed: .*max_failure_rate=0.5"):
        search(tmp_path, failing, max_failure_rate=0.5)


def test_no_job_starts_after_the_timeout(tmp_path: Path) -> None:
    assert len(search(tmp_path, distance, timeout=1e-9).batches) == 0
    assert len(search(tmp_path, distance, timeout=3600).batches) == 6


def measured(folder: Path, lacking: Sequence[int] = ()) -> Objective:
    """Return an objective whose runs measure the loss, but for the jobs that lack it."""

    def objective(number: int, given: dict[str, str]) -> None:
        run_dir = study_files.job_folder(folder, number)
        if run_dir.exists():
            write_session(run_dir)
        else:
            write_run(run_dir, summary=False)
        session = session_of(run_dir)
        rate = float(given["optimizer.lr"])
        metrics = {"validation": {"accuracy": 1.0}}
        if number not in lacking:
            metrics["validation"]["loss"] = rate
        summary = {"best": None, "metrics": metrics, "seconds": 1 / rate}
        sessions.end(session, 0, summary=summary)

    return objective


def test_several_objectives_end_in_a_pareto_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, directions = ["validation/loss", "seconds"], ["minimize", "minimize"]
    search(tmp_path, measured(tmp_path), metrics=metrics, directions=directions)
    shown = capsys.readouterr().out
    assert "Pareto front" in shown
    assert shown.count("Pareto-optimal trial") == 6  # faster is worse
    assert "python -m runner" in shown


def test_a_metric_that_is_not_measured_is_told_after_one_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'validation/loss'"):
        search(tmp_path, measured(tmp_path), metrics=["validation/los"], directions=["minimize"])
    assert len(study_of(tmp_path).trials) == 1


LOSS = {"metrics": ["validation/loss"], "directions": ["minimize"]}


def test_a_job_without_the_objective_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = measured(tmp_path, lacking=[2])
    assert search(tmp_path, lacking, n_jobs=2, **LOSS).batches == [[0, 1], [2, 3], [4, 5]]
    assert states(tmp_path) == ["COMPLETE", "COMPLETE", "FAIL", *["COMPLETE"] * 3]
    assert "trial 2: failed (hydra.sweeper.metrics=validation/loss: the run measures" in (
        capsys.readouterr().out
    )
    assert search(tmp_path, lacking, **LOSS).batches == [[2]]


def killed_search(tmp_path: Path, count: int, steps: int, kills: int, longest: float) -> None:
    """Kill a search with a pruner, and assert that no trial was lost or doubled."""
    line = (
        *("hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(1e-5,1.0))", *QUICK),
        *("hydra.sweeper.pruner={name: median, n_startup_trials: 2}"),
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


# `test_kills.py` kills a sweep; that a study continues, with the trials of jobs that stopped or
# failed, is tested above.
@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(tmp_path: Path) -> None:
    killed_search(tmp_path, count=4, steps=20, kills=1, longest=1.0)


@pytest.mark.slow
def test_twenty_trials_with_pruning_killed_three_times(tmp_path: Path) -> None:
    killed_search(tmp_path, count=20, steps=120, kills=3, longest=8.0)


def test_a_study_of_another_sweep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = {"storage": "shared.journal", "study_name": "s", "n_trials": 2}
    search(tmp_path / "a", distance, **shared)
    with pytest.raises(ConfigError, match="a study is of one sweep"):
        search(tmp_path / "b", distance, **shared)
    assert search(tmp_path / "b", distance, **{**shared, "study_name": "t"}).batches == [[0], [1]]
    assert search(tmp_path / "a", distance, **{**shared, "n_trials": 3}).batches == [[2]]


def test_a_study_that_was_lost_is_refused(tmp_path: Path) -> None:
    search(tmp_path, distance, n_trials=1)
    (tmp_path / "0000").mkdir()
    (tmp_path / study_files.JOURNAL).unlink()
    with pytest.raises(ConfigError, match=r"Restore it from a copy, .*sweep\.dir=DIR"):
        search(tmp_path, distance, n_trials=2)


# -- what was found ------------------------------------------------------------------------


def study_with(*values: tuple[float, ...], directions: tuple[str, ...]) -> optuna.Study:
    study = optuna.create_study(directions=list(directions))
    for number, value in enumerate(values):
        trial = study.ask()
        trial.suggest_float("optimizer.lr", 0, 1)
        overrides = ["name=a b", f"++optimizer.lr={number}"]
        trial.set_user_attr(optuna_study.JOB, {"number": number, "overrides": overrides})
        study.tell(trial, list(value))
    return study


def shown_of(study: optuna.Study, *metrics: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    optuna_sweeper.show(study, optuna_study.trials_of(study), metrics, "mine", console)
    return out.getvalue()


def test_the_best_trial_of_one_objective_with_its_command() -> None:
    study = study_with((3.0,), (1.0,), (2.0,), directions=("maximize",))
    text = shown_of(study, "validation/accuracy")
    assert "3 trials: 3 complete" in text
    assert "best trial 0: validation/accuracy 3" in text
    assert "python -m runner --config-name mine 'name=a b' optimizer.lr=0" in text


def test_the_front_of_several_objectives() -> None:
    values = ((1.0, 5.0), (2.0, 4.0), (0.5, 6.0), (3.0, 9.0))
    study = study_with(*values, directions=("minimize", "maximize"))
    best = optuna_sweeper.best_trials(optuna_study.trials_of(study), study)
    assert list(best) == [2, 3]  # 0.5 and 6 are better than 1 and 5, and than 2 and 4
    assert shown_of(study, "validation/loss", "seconds").count("Pareto-optimal") == len(best)


def test_a_study_without_results_is_counted() -> None:
    study = optuna.create_study()
    assert shown_of(study, "best") == "0 trials: none\n"


# -- a directory that was moved ----------------------------------------------------------


def test_a_sweep_directory_that_was_moved_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"

    def stopping(number: int, given: dict[str, str]) -> float:
        if number == 2:
            raise JobStopped("job 0002 was stopped")
        return distance(number, given)

    assert search(here, stopping).batches == [[0], [1], [2]]
    begun = study_of(here).trials
    here.rename(there)
    assert search(there, distance).batches == [[2], [3], [4], [5]]
    shown = capsys.readouterr().out
    assert "The study goes on: 2 of 6 trials have ended." in shown
    trials = study_of(there).trials
    assert [trial.params for trial in trials[:3]] == [trial.params for trial in begun]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    there.rename(here)
    assert search(here, distance).batches == []
    assert len(study_of(here).trials) == 6
