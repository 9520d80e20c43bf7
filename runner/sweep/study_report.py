"""What a search has found: its best trials with their commands, and which keys mattered."""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from runner.recipe import hydra_setup
from runner.run_dir.study import BEST
from runner.training.console import PipedConsole
from runner.training.optuna_study import JOB

# Importances of fewer trials say nothing.
LEAST_FOR_IMPORTANCE = 5


def show(
    study: optuna.Study,
    newest: Mapping[int, FrozenTrial],
    metrics: tuple[str, ...],
    config_name: str,
    console: Console | None = None,
) -> None:
    """Print the best trial, or the Pareto front of several objectives, and importances.

    Args:
        study: of all trials.
        newest: the trials of this sweep, by the number of their job.
        metrics: names of the objectives.
        config_name: of the recipes.
        console: where to; None: standard output.
    """
    console = console or PipedConsole(highlight=False, soft_wrap=True)
    states = Counter(trial.state for trial in newest.values())
    counts = ", ".join(
        f"{states[state]} {word}"
        for state, word in (
            (TrialState.COMPLETE, "complete"),
            (TrialState.PRUNED, "pruned"),
            (TrialState.FAIL, "failed"),
            (TrialState.RUNNING, "running"),
        )
        if states[state]
    )
    console.print(f"{len(newest)} trials: {counts or 'none'}")
    best = best_trials(newest, study)
    if not best:
        return
    if len(metrics) > 1:
        console.print(_front(best, metrics))
    for number, trial in best.items():
        values = ", ".join(
            f"{name} {value:.6g}" for name, value in zip(metrics, trial.values, strict=True)
        )
        console.print(
            f"{'best' if len(metrics) == 1 else 'Pareto-optimal'} trial {number}: {values}"
        )
        if metrics != (BEST,):  # else the table of the sweep names it
            console.print(f"  {command(trial.user_attrs[JOB]['overrides'], config_name)}")
    for index, metric in enumerate(metrics):
        table = _importances(study, index, metric)
        if table is not None:
            console.print(table)


def best_trials(newest: Mapping[int, FrozenTrial], study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the best trial of a sweep by the number of its job; of several objectives the front.

    A trial is in the front where no other is at least as good in all objectives and better in one.
    """
    signs = [1 if one.name == "MINIMIZE" else -1 for one in study.directions]
    costs = {
        number: tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
        for number, trial in sorted(newest.items())
        if trial.state is TrialState.COMPLETE
    }
    if len(signs) == 1:
        best = min(costs, key=lambda number: costs[number], default=None)
        return {} if best is None else {best: newest[best]}
    front = [
        number
        for number, cost in costs.items()
        if not any(
            other != cost and all(a <= b for a, b in zip(other, cost, strict=True))
            for other in costs.values()
        )
    ]
    return {number: newest[number] for number in sorted(front, key=lambda n: costs[n])}


def command(overrides: Sequence[str], config_name: str) -> str:
    """Return the command that trains one job alone."""
    name = [] if config_name == hydra_setup.PRIMARY else ["--config-name", config_name]
    words = [*name, *(hydra_setup.closed(override) for override in overrides)]
    return shlex.join(["python", "-m", "runner", *words])


def _front(best: Mapping[int, FrozenTrial], metrics: Sequence[str]) -> Table:
    keys = list(dict.fromkeys(key for trial in best.values() for key in trial.params))
    table = Table("trial", *metrics, *keys, title="Pareto front")
    for number, trial in best.items():
        values = [f"{value:.6g}" for value in trial.values]
        table.add_row(str(number), *values, *(_short(trial.params.get(key)) for key in keys))
    return table


def _short(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _importances(study: optuna.Study, index: int, metric: str) -> Table | None:
    """Return how much each key explains of an objective; None where trials cannot tell."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = {trial.values[index] for trial in complete}
    shared = set.intersection(*(set(trial.params) for trial in complete)) if complete else set()
    varied = {key for key in shared if len({str(trial.params[key]) for trial in complete}) > 1}
    if len(complete) < LEAST_FOR_IMPORTANCE or len(values) < 2 or not varied:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        found = optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
            params=sorted(varied),
            target=lambda trial: trial.values[index],
        )
    table = Table("key", "importance", title=f"Importance for {metric} (fANOVA)")
    for key, part in found.items():
        table.add_row(key, f"{part:.2f}")
    return table
