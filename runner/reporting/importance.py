"""How much of an objective follows from each swept key, by scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.reporting import swept_keys
from runner.run_dir.record import MISSING, RunRecord

LEAST_RUNS = 8
NUM_TREES, NUM_REPEATS = 200, 20
METHOD = (
    "permutation importance of a random forest (scikit-learn): by how much the forest's error "
    "grows when the values of a key are shuffled, as a share of the sum"
)


@dataclass(frozen=True)
class Importance:
    """The importance of keys, 0 to 1, largest first; where it cannot be told, the reason.

    `fit` is R² of the forest on runs that a tree has not seen: near 0 or below, it tells nothing.
    """

    shares: dict[str, float]
    fit: float = math.nan
    reason: str = ""


def importance(runs: Sequence[RunRecord], keys: Sequence[str]) -> Importance:
    """Return how much of the objective of runs follows from each of the swept keys."""
    judged = [(run, run.objective.value) for run in runs if run.objective is not None]
    judged = [(run, value) for run, value in judged if math.isfinite(value)]
    if len(judged) < LEAST_RUNS or not keys:
        rule = f"it takes at least {LEAST_RUNS} runs with an objective, and a swept key"
        return Importance({}, reason=f"{rule}: here are {len(judged)} and {len(keys)}")
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    values = [[swept_keys.value(run, key) for run, _ in judged] for key in keys]
    features = np.column_stack([_column(column) for column in values])
    target = np.array([value for _, value in judged])
    if float(np.ptp(target)) == 0.0:
        return Importance({}, reason="all runs have the same objective")
    forest = RandomForestRegressor(NUM_TREES, oob_score=True, random_state=0).fit(features, target)
    found = permutation_importance(forest, features, target, n_repeats=NUM_REPEATS, random_state=0)
    raw = np.maximum(found.importances_mean, 0.0)
    shares = raw / raw.sum() if raw.sum() > 0 else raw
    ordered = sorted(zip(keys, map(float, shares), strict=True), key=lambda one: -one[1])
    return Importance(dict(ordered), float(forest.oob_score_))


def _column(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return a key's values as numbers; of words, their places in the sorted list of them.

    A run that lacks the key has a place of its own, below the others.
    """
    known = [value for value in values if value is not MISSING]
    if known and all(isinstance(value, int | float) for value in known):
        below = 2 * min(known) - max(known) - 1.0
        return np.array([below if value is MISSING else value for value in values], dtype=float)
    words = sorted({str(value) for value in known})
    places = [-1 if value is MISSING else words.index(str(value)) for value in values]
    return np.array(places, dtype=float)
