"""Trials of a study: a run reports its evaluations, and ends when the pruner decides so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel.comm.ops import broadcast_object_list
from accel.machine.errors import ConfigError
from accel.machine.imports import require
from runner.runs import json_files
from runner.runs.json_files import SWEEP, Fields
from runner.training.evaluation import monitored_value
from runner.training.run import Callback
from runner.training.state import PRUNED

if TYPE_CHECKING:
    from optuna.trial import Trial

    from runner.training.run import Run

NAME = "hydra.sweeper"


def callbacks_of(run_dir: Path) -> dict[str, Callback]:
    """Return the callback of a run that reports to a study; none for any other run."""
    if not run_dir.name.isdigit():
        return {}
    search = json_files.read_json(run_dir.parent / SWEEP).get("search") or {}
    metrics = search.get("metrics") or []
    # Optuna prunes by one objective only, and a run reports validation metrics.
    if len(metrics) != 1 or not metrics[0].startswith(("best", "validation/")):
        return {}
    return {NAME: TrialReport(search, run_dir)}


class TrialReport(Callback):
    """Reports validation metrics to the trial of the run, and prunes it.

    Rank 0 asks the pruner; all ranks follow its decision. The decision is written to the study
    before it takes effect: a run that is killed in between is pruned when it is resumed.

    Args:
        search: what `sweep.json` records of the search.
        run_dir: of a job, whose number is the name; without a running trial nothing is reported.
    """

    def __init__(self, search: Fields, run_dir: Path) -> None:
        self.search, self.run_dir = search, run_dir
        self.metric = search["metrics"][0].partition("/")[2]  # empty: the monitored one
        self._trial: Trial | None = None

    def on_start(self, loop: Run) -> None:
        """Open the study, and stop at once if the trial has been pruned before."""
        mode = self.search["modes"][0]
        if not self.metric and mode != loop.mode:
            raise ConfigError.of(
                f"hydra.sweeper.direction={mode}imize",
                f"the best {loop.monitor} of this run is the {loop.mode}imum",
                f"Set hydra.sweeper.direction={loop.mode}imize, or checkpoint.mode.",
            )
        if loop.accelerator.is_main_process:
            self._trial = _running_trial(self.search, self.run_dir)
        decided = self._trial is not None and PRUNED in self._trial.user_attrs
        if self._agreed(loop, decided):
            loop.stop("pruned before", PRUNED)

    def on_evaluate(self, loop: Run, split: str, metrics: Mapping[str, float]) -> None:
        """Report the metric, and stop if the pruner decides so."""
        if split != "validation":
            return
        metric = self.metric or loop.monitor
        if self.metric and metric not in metrics:
            return  # not every evaluation need measure it
        value = monitored_value(metrics, metric, "hydra.sweeper.metrics")
        step = loop.state.step
        prune = self._trial is not None and _report(self._trial, step, value)
        # A run at its end has lost nothing any more.
        if loop.stopped is None and self._agreed(loop, prune):
            if self._trial is not None:
                self._trial.set_user_attr(PRUNED, step)
            loop.stop(f"pruned at {metric} {value:.6g}", PRUNED)

    def _agreed(self, loop: Run, decision: bool) -> bool:
        """Return the decision of rank 0."""
        shared = [decision]
        if loop.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        return shared[0]


def _report(trial: Trial, step: int, value: float) -> bool:
    """Report a value of a step, once; return whether the trial is to be pruned."""
    frozen = trial.study.get_trials(deepcopy=False)[trial.number]
    if step not in frozen.intermediate_values:  # a resumed run measures some steps again
        trial.report(value, step)
    with warnings.catch_warnings():  # a trial that has measured no number yet is pruned
        warnings.simplefilter("ignore", RuntimeWarning)
        return trial.should_prune()


def _running_trial(search: Fields, run_dir: Path) -> Trial | None:
    """Return the running trial of a job; None: there is none, as where it is resumed by hand."""
    require("optuna", "a run of an Optuna study", extra="optuna")
    import optuna

    from runner.training import optuna_study
    from runner.training.optuna_study import PRUNER

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna_study.storage_of(search["storage"], run_dir.parent)
    study = optuna.load_study(
        study_name=search["study_name"],
        storage=storage,
        # It draws nothing: the parameters of the trial are there.
        sampler=optuna.samplers.RandomSampler(),
        pruner=optuna_study.make(PRUNER, search["pruner"]),
    )
    found = optuna_study.trials_of(study).get(int(run_dir.name))
    if found is None or found.state is not optuna.trial.TrialState.RUNNING:
        return None
    return optuna_study.running(study, storage, found)
