"""Runs that report to a trial, and are pruned (S4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.runs import json_files
from runner.training import optuna_study, pruning
from runner.training.optuna_study import JOB
from tests.helpers import run_distributed
from tests.runner.loops import NUM_TRAIN, Points, Scripted, newest, recipe_of, run

PRUNER = {"name": "median", "n_startup_trials": 1}


def study_in(
    folder: Path, *, mode: str = "min", metrics: tuple[str, ...] = ("best",), pruner: Any = PRUNER
) -> optuna.Study:
    """Return a study with one good complete trial, and a running one, of job 1."""
    search = {"storage": "optuna.journal", "study_name": "s", "modes": [mode], "pruner": pruner}
    json_files.write_json(folder / "sweep.json", {"search": {**search, "metrics": metrics}})
    storage = optuna_study.storage_of("optuna.journal", folder)
    found = optuna.create_study(storage=storage, study_name="s", direction=f"{mode}imize")
    first = found.ask()
    for step in (5, 10, 15, 20):
        first.report(1.0, step)
    found.tell(first, 1.0)
    found.ask().set_user_attr(JOB, 1)
    return found


def train(folder: Path, *values: float, **kwargs: Any) -> dict[str, Any]:
    run_dir = folder / "0001"
    run_dir.mkdir(exist_ok=True)
    data = Data(Points(NUM_TRAIN), Points(8), Points(8))
    callbacks = pruning.callbacks_of(run_dir)
    objective = Scripted(*values)
    recipe = recipe_of(trainer__epochs=4)
    return run(run_dir, recipe, data=data, objective=objective, callbacks=callbacks, **kwargs)


def test_a_bad_run_is_pruned_and_complete(tmp_path: Path) -> None:
    found = study_in(tmp_path)
    summary = train(tmp_path, 3.0)
    assert (summary["stopped"], summary["step"], summary["complete"]) == ("pruned", 5, True)
    assert "test" not in summary["metrics"]
    trial = found.trials[1]
    assert (trial.intermediate_values, trial.user_attrs["pruned"]) == ({5: 3.0}, 5)


def test_a_good_run_reports_all_its_values(tmp_path: Path) -> None:
    found = study_in(tmp_path)
    summary = train(tmp_path, 0.9, 0.8, 0.7, 0.6, 0.6)
    assert (summary["stopped"], summary["step"]) == ("epochs", 20)
    assert found.trials[1].intermediate_values == {5: 0.9, 10: 0.8, 15: 0.7, 20: 0.6}


def test_the_last_evaluation_prunes_nothing_any_more(tmp_path: Path) -> None:
    found = study_in(tmp_path)
    assert train(tmp_path, 0.9, 0.8, 0.7, 9.0, 9.0)["stopped"] == "epochs"
    assert "pruned" not in found.trials[1].user_attrs


def test_a_run_that_was_killed_after_the_decision_is_pruned_at_once(tmp_path: Path) -> None:
    found = study_in(tmp_path, pruner=None)
    assert train(tmp_path, 0.5, 0.5, 0.5, 0.5, 0.5)["stopped"] == "epochs"
    storage = optuna_study.storage_of("optuna.journal", tmp_path)
    optuna_study.running(found, storage, found.trials[1]).set_user_attr("pruned", 5)
    resume = newest(tmp_path / "0001")
    assert train(tmp_path, 0.5, resume_from=resume)["stopped"] == "pruned"


def test_a_finished_trial_is_left_alone(tmp_path: Path) -> None:
    found = study_in(tmp_path)
    found.tell(1, 0.25)
    assert train(tmp_path, 9.0, 9.0, 9.0, 9.0, 9.0)["stopped"] == "epochs"
    assert found.trials[1].state is TrialState.COMPLETE
    assert found.trials[1].intermediate_values == {}


def test_another_metric_may_be_the_one_reported(tmp_path: Path) -> None:
    found = study_in(tmp_path, metrics=("validation/count",), pruner=None)
    train(tmp_path, 9.0, 9.0, 9.0, 9.0, 9.0)
    assert set(found.trials[1].intermediate_values.values()) == {8.0}


def test_runs_of_several_objectives_report_nothing(tmp_path: Path) -> None:
    study_in(tmp_path, metrics=("best", "seconds"))
    assert pruning.callbacks_of(tmp_path / "0001") == {}


def test_a_study_in_the_other_direction_is_refused(tmp_path: Path) -> None:
    study_in(tmp_path, mode="max")
    with pytest.raises(ConfigError, match="the best loss of this run is the minimum"):
        train(tmp_path, 1.0)


def pruned_together(folder: str) -> tuple[str, int]:
    summary = train(Path(folder), 3.0)
    return str(summary["stopped"]), int(summary["step"])


def test_all_ranks_follow_the_decision_of_rank_0(tmp_path: Path) -> None:
    found = study_in(tmp_path)
    assert run_distributed(pruned_together, 2, str(tmp_path)) == [("pruned", 5)] * 2
    assert found.trials[1].intermediate_values == {5: 3.0}
