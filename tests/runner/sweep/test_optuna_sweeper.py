"""Searches with Optuna: from a command line to the trials of a study."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from optuna.trial import TrialState

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup, sweepers
from runner.run_dir import study as study_files
from runner.run_dir.json_files import METRICS, SUMMARY
from runner.sweep.job_errors import JobFailed, JobStopped
from runner.sweep.journal import Journal
from runner.sweep.optuna_sweeper import STUDY, Search
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.training import optuna_study
from tests.helpers import python
from tests.runner.sweep.kills import ROOT, killed_sweep

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


def mark_of(folder: Path) -> str:
    file = study_files.of_sweep(folder)
    assert file is not None
    return file.sweep


def states(folder: Path) -> list[str]:
    newest = optuna_study.trials_of(study_of(folder), mark_of(folder))
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
    assert "Importance for best" in shown


@pytest.mark.parametrize(("sampler", "told"), [("cmaes", True), ("tpe", False)])
def test_keys_that_a_sampler_cannot_search_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampler: str, told: bool
) -> None:
    search(tmp_path, distance, sampler=sampler)
    assert capsys.readouterr().out.count("cmaes samples seed at random") == told


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


def test_jobs_that_do_not_follow_each_other_are_launched_apart(tmp_path: Path) -> None:
    def failing(number: int, given: dict[str, str]) -> float:
        if number in (1, 2, 4):
            raise JobFailed("it broke")
        return distance(number, given)

    search(tmp_path, failing)
    assert search(tmp_path, distance, n_jobs=6).batches == [[1, 2], [4]]


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
        run_dir.mkdir(exist_ok=True)
        rate = float(given["optimizer.lr"])
        metrics = {"validation": {"accuracy": 1.0}}
        if number not in lacking:
            metrics["validation"]["loss"] = rate
        summary = {"best": None, "metrics": metrics, "seconds": 1 / rate}
        (run_dir / SUMMARY).write_text(json.dumps(summary))

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


def test_a_misspelt_metric_is_told_once_the_batch_is_recorded(tmp_path: Path) -> None:
    judged = {"metrics": ["validation/los"], "directions": ["minimize"]}
    with pytest.raises(ConfigError, match="Did you mean 'validation/loss'"):
        search(tmp_path, measured(tmp_path), n_jobs=2, **judged)
    assert states(tmp_path) == ["FAIL", "FAIL"]


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


def test_a_search_whose_first_job_lacks_the_objective_goes_on_when_it_is_repeated(
    tmp_path: Path,
) -> None:
    lacking = measured(tmp_path, lacking=[0])
    with pytest.raises(ConfigError, match="Did you mean"):
        search(tmp_path, lacking, **LOSS)
    assert search(tmp_path, lacking, **LOSS).batches == [[n] for n in range(6)]
    assert states(tmp_path) == ["FAIL", *["COMPLETE"] * 5]


def test_a_metric_that_only_earlier_evaluations_have_is_their_last_value(tmp_path: Path) -> None:
    lines = [{"split": "validation", "step": n, "loss": 1 / n, "accuracy": 1.0} for n in (1, 2)]

    def objective(number: int, given: dict[str, str]) -> None:
        measured(tmp_path, lacking=[0])(number, given)
        text = "".join(f"{json.dumps(one)}\n" for one in lines)
        (study_files.job_folder(tmp_path, number) / METRICS).write_text(text)

    search(tmp_path, objective, n_trials=1, **LOSS)
    assert study_of(tmp_path).best_value == 0.5


@pytest.mark.parametrize(
    ("space", "changes", "message"),
    [
        (("seed=1,2,3", SPACE[0]), {}, "Search the same values"),
        ((), {"metrics": "seconds", "direction": "maximize"}, "other directions"),
        ((), {"direction": "maximize"}, "the best of the monitored metric is the minimum"),
    ],
)
def test_a_study_of_something_else_is_refused(
    tmp_path: Path, space: tuple[str, ...], changes: dict[str, object], message: str
) -> None:
    search(tmp_path, distance, n_trials=2)
    with pytest.raises(ConfigError, match=message):
        search(tmp_path, distance, *space, **changes)


def test_values_of_other_metrics_are_not_mixed(tmp_path: Path) -> None:
    search(tmp_path, measured(tmp_path), n_trials=2, **LOSS)
    message = r"metrics=seconds: trials of the study 'sweep' are judged by validation/loss"
    with pytest.raises(ConfigError, match=message):
        search(tmp_path, measured(tmp_path), **{**LOSS, "metrics": ["seconds"]})
    assert len(study_of(tmp_path).trials) == 2


def test_a_study_of_an_older_version_has_the_metrics_of_its_file(tmp_path: Path) -> None:
    search(tmp_path, measured(tmp_path), n_trials=1, **LOSS)
    journal = tmp_path / study_files.JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if "objectives" not in line))
    with pytest.raises(ConfigError, match="are judged by validation/loss"):
        search(tmp_path, measured(tmp_path), **{**LOSS, "metrics": ["seconds"]})
    assert search(tmp_path, measured(tmp_path), n_trials=2, **LOSS).batches == [[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics": ["validation/loss"], "directions": ["minimize"]},
            "judged by best.*study_name",
        ),
        ({"config_name": "accurate"}, "checkpoint.monitor=accuracy: .* are judged by loss"),
    ],
)
def test_sweeps_that_share_a_study_have_one_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    text = "defaults: [config, _self_]\ncheckpoint: {monitor: accuracy, mode: min}\n"
    (tmp_path / "conf" / "accurate.yaml").write_text(text)
    shared = {"storage": "shared.journal", "study_name": "s", "n_trials": 1}
    search(tmp_path / "one", distance, **shared)
    with pytest.raises(ConfigError, match=message):
        search(tmp_path / "two", distance, **shared, **changes)


def test_the_direction_of_best_is_checked_wherever_it_stands(tmp_path: Path) -> None:
    both = {"metrics": ["seconds", "best"], "directions": ["minimize", "maximize"]}
    with pytest.raises(ConfigError, match="monitored metric is the minimum"):
        search(tmp_path, distance, **both)


def test_sweeps_may_share_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        launched = search(tmp_path / name, distance, storage="shared.journal", study_name="s")
        assert launched.batches == [[n] for n in range(6)]
    storage = optuna_study.storage_of("shared.journal", tmp_path)
    shared = optuna.load_study(study_name="s", storage=storage)
    assert len({trial.params["optimizer.lr"] for trial in shared.trials}) == 12


def test_a_copy_of_a_search_takes_no_trials_of_a_shared_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search(tmp_path / "one", distance, storage="shared.journal")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ConfigError, match=rf"two: its search goes on in {tmp_path / 'one'}, "):
        search(tmp_path / "two", distance, storage="shared.journal", n_trials=8)
    assert search(tmp_path / "one", distance, storage="shared.journal", n_trials=7).batches
    (tmp_path / "one").rename(tmp_path / "old")  # the copy replaces it
    assert search(tmp_path / "two", distance, storage="shared.journal", n_trials=8).batches
    with pytest.raises(ConfigError, match=rf"old: its search goes on in {tmp_path / 'two'}, "):
        search(tmp_path / "old", distance, storage="shared.journal", n_trials=9)


def journaled(folder: Path) -> Objective:
    """Return an objective whose jobs are recorded in the sweep's own journal."""

    def objective(number: int, given: dict[str, str]) -> float:
        journal, overrides = Journal(folder), [f"{key}={value}" for key, value in given.items()]
        value = distance(number, given)
        journal.ended(number, journal.started(number, overrides), overrides, 0, objective=value)
        return value

    return objective


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, "optuna.journal was missing, or empty"),
        ({"storage": "own.journal"}, r"The study '[\w-]+' lacked trials of this sweep"),
    ],
)
def test_a_lost_journal_of_a_study_is_told_and_its_trials_are_rebuilt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    lost: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sweep"
    search(folder, journaled(folder), **changes)
    for path in tmp_path.rglob("*.journal"):
        path.unlink()
    capsys.readouterr()
    assert search(folder, journaled(folder), n_trials=7, **changes).batches == [[6]]
    told = r"6 trials were rebuilt from journal.jsonl and the runs' evaluations\."
    shown = capsys.readouterr().out
    assert re.search(rf"{lost}: {told}\nThe study goes on: 6 of 7", shown), shown
    assert search(folder, journaled(folder), n_trials=7, **changes).batches == []
    assert "rebuilt" not in capsys.readouterr().out


def test_a_journal_of_a_study_that_ends_early_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(tmp_path, journaled(tmp_path))
    journal = tmp_path / study_files.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    last = [i for i, line in enumerate(lines) if line.startswith(b'{"op_code":4')][-1]
    journal.write_bytes(b"".join(lines[:last])[:-9] + b"x" * 9)  # it is cut off in a line
    assert search(tmp_path, journaled(tmp_path)).batches == [[4]]
    shown = capsys.readouterr().out
    assert "optuna.journal ended early: 1 trial was rebuilt from journal.jsonl" in shown


@pytest.mark.slow
def test_a_pruner_decides_as_before_when_the_journal_was_lost(tmp_path: Path) -> None:
    def printed(count: int) -> str:
        line = (
            *("hydra/sweeper=random", "optimizer.lr=tag(log,interval(1e-6,1e-1))", *QUICK),
            *("hydra.sweeper.pruner=median", "hydra.sweeper.pruner.n_startup_trials=1"),
            *(f"hydra.sweeper.n_trials={count}", "trainer.max_steps=10", "sweep.dir=here"),
        )
        command, kept = python("-m", "runner", "-m", *line), {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.check_output(command, cwd=tmp_path, env=kept, text=True, timeout=240)

    printed(2)
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    whole = printed(3)
    assert "trial 2: pruned" in whole
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "copy").rename(tmp_path / "here")
    (tmp_path / "here" / study_files.JOURNAL).unlink()
    rebuilt = printed(3)
    assert "2 trials were rebuilt from journal.jsonl" in rebuilt
    assert "trial 2: pruned" in rebuilt


def killed_search(tmp_path: Path, count: int, steps: int, kills: int, longest: float) -> None:
    """Kill a search with a pruner, and assert that no trial was lost or doubled."""
    line = (
        *("hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(1e-5,1.0))", *QUICK),
        *("hydra.sweeper.pruner=median", "hydra.sweeper.pruner.n_startup_trials=2"),
        *(f"hydra.sweeper.n_trials={count}", "sweep.jobs=2", f"trainer.max_steps={steps}"),
    )
    ended = killed_sweep(line, tmp_path, kills=kills, longest=longest)
    if ended.code:  # a job that was killed by itself is tried again by the next command
        ended = killed_sweep(line, tmp_path, kills=0, longest=0.0)
    assert ended.code == 0, ended.output
    done = [one["job"] for one in ended.records if one.get("status") in ("finished", "pruned")]
    assert sorted(done) == list(range(count)), ended.killed
    names = sorted(path.name for path in ended.folder.glob("[0-9]*"))
    assert names == [f"{job:04}" for job in range(count)]
    newest = optuna_study.trials_of(study_of(ended.folder), mark_of(ended.folder))
    kept = {"COMPLETE": "finished", "PRUNED": "pruned"}
    by_job = {one["job"]: one["status"] for one in ended.records if one["event"] == "ended"}
    assert {n: kept[trial.state.name] for n, trial in newest.items()} == by_job
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
