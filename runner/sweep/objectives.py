"""The objectives that a search judges a run by. Free of torch and Optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accel.machine.errors import ConfigError, nearest
from runner.runs.json_files import PLACE, JsonObject
from runner.runs.record import RunRecord

BEST = "best"  # the best value of the monitored validation metric
SPLITS = ("validation", "test")
# Numbers of summary.json.
NUMBERS = ("seconds", "samples_per_second", "num_parameters", "step", "epoch", "samples")


def values_of(run: RunRecord, metrics: Sequence[str]) -> list[float]:
    """Return the objectives of a run that is done, as `hydra.sweeper.metrics` names them.

    One of a split is the last measured value: not every evaluation need have it.

    Raises:
        ConfigError: if the run measures no such metric.
    """
    return [_value_of(run, metric) for metric in metrics]


def _value_of(run: RunRecord, metric: str) -> float:
    if metric in NUMBERS:
        value = run.summary.get(metric)
        return math.nan if value is None else float(value)
    if metric == BEST and run.objective is not None:
        return run.objective.value
    measured = _measured(run)
    if metric not in measured:
        rule = f"the run measures {', '.join(measured) or 'nothing'}"
        raise ConfigError.of(f"hydra.sweeper.metrics={metric}", rule, nearest(metric, measured))
    return float(measured[metric])


def _measured(run: RunRecord) -> JsonObject:
    """Return by "<split>/<metric>" the last measured value, from metrics.jsonl."""
    found: JsonObject = {}
    for record in run.records():
        for key, value in record.items():
            if key not in PLACE and value is not None and record.get("split") in SPLITS:
                found[f"{record['split']}/{key}"] = value
    return found
