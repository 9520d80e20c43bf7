"""Learning curves from metrics.jsonl, the keys in which runs differ, and groups over seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.recipe import resumed_recipe
from runner.reporting.filters import leaves
from runner.reporting.run_table import cell
from runner.runs.json_files import PLACE, JsonObject, finite, number
from runner.runs.record import CODE, FINISHED, MISSING, RunRecord

SEED = "seed"
# Keys of a recipe that change nothing of what a run computes, and how fast it is, neither.
NO_CAUSE = ("name", "output_dir", "tags", "resume", "run_dir", "tracker", "profile", "submit")
# Of the other keys that `resume=auto` ignores, those that are worth a look on their own.
SPEED = (("distributed", "num_processes"), ("dataloader",))
FACTORY = ("name", "_target_")

MOST_POINTS = 120  # of a curve that is drawn

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One metric over optimizer steps; both arrays are [points], values may be NaN."""

    steps: Array
    values: Array


@dataclass(frozen=True)
class Group:
    """Runs whose recipes and code are equal but for the seed.

    Attributes:
        label: the swept keys and their values, e.g. "optimizer.lr=0.01"; or the run's name.
        runs: its runs; several may have the same seed.
    """

    label: str
    runs: list[RunRecord]


@dataclass(frozen=True)
class Band:
    """A curve of a group [points]: the mean over its seeds, and the lowest and highest value.

    Where a run has measured NaN or infinity, all three are NaN: a gap. With one run they are equal.

    Attributes:
        num_runs: how many runs it is of.
        num_diverged: how many of them have measured what is no finite number.
    """

    steps: Array
    mean: Array
    low: Array
    high: Array
    num_runs: int
    num_diverged: int = 0

    @property
    def is_drawn(self) -> bool:
        """Whether it has a point to draw."""
        return bool(np.isfinite(self.mean).any())


def read_curves(run: RunRecord) -> dict[str, Curve]:
    """Return the curves of a run by ``<split>/<metric>``; lines that are damaged are left out."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for record in run.records():
        split, step = record.get("split"), number(record.get("step"))
        if step is None:
            continue
        for name, value in record.items():
            read = None if name in PLACE else number(value)
            if read is not None:
                steps, values = found.setdefault(f"{split}/{name}", ([], []))
                steps.append(step)
                values.append(read)
    return {name: Curve(np.array(s), np.array(v)) for name, (s, v) in found.items()}


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return a curve of at most `most` points: means over equal ranges of its points.

    Of a range only what is finite counts: a single NaN among many points is no gap.
    """
    if len(curve.steps) <= most:
        return curve
    parts = np.array_split(np.arange(len(curve.steps)), most)
    return Curve(
        np.array([curve.steps[part[-1]] for part in parts]),
        np.array([_mean(curve.values[part]) for part in parts]),
    )


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def band(curves: Sequence[Curve], most: int = MOST_POINTS) -> Band:
    """Return mean and range of curves, on the steps of the longest, as far as each has been."""
    longest = max(curves, key=lambda curve: len(curve.steps))
    steps = thinned(longest, most).steps
    thin = [thinned(curve, most) for curve in curves]
    been = np.vstack([(one.steps[0] <= steps) & (steps <= one.steps[-1]) for one in thin])
    values = np.vstack([np.interp(steps, one.steps, _finite(one.values)) for one in thin])
    mean = np.where(been, values, 0.0).sum(axis=0) / been.sum(axis=0)
    low = np.where(been, values, math.inf).min(axis=0)
    high = np.where(been, values, -math.inf).max(axis=0)
    diverged = sum(not np.isfinite(curve.values).all() for curve in curves)
    return Band(steps, mean, low, high, len(curves), diverged)


def _finite(values: Array) -> Array:
    """Return values with NaN in place of infinity."""
    return np.where(np.isfinite(values), values, math.nan)


# -- keys ----------------------------------------------------------------------------------


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the dotted keys in which the recipes of runs differ, the seed not among them.

    Where the factories of a node differ, its other keys count if a command has set them. Where the
    runs were made by different code, the key `CODE` is one of them. Keys that only say where a run
    is computed do not count; the numbers of processes and workers do where nothing else differs.
    """
    recipes = [_flat(run) for run in runs]
    names = dict.fromkeys(key for recipe in recipes for key in recipe)
    differing = [name for name in names if _differ([r.get(name, MISSING) for r in recipes])]
    given = {
        str(one).lstrip("+").partition("=")[0]
        for run in runs
        for one in run.job.get("overrides") or ()
    }
    nodes = [name.rpartition(".")[0] for name in differing if name.rpartition(".")[2] in FACTORY]
    found = [
        name
        for name in differing
        if name in given
        or name.rpartition(".")[2] in FACTORY
        or not any(name.startswith(f"{node}.") for node in nodes)
    ]
    causes = [name for name in found if not _lies_in(name, resumed_recipe.ELSEWHERE)]
    causes += [CODE] if len({run.code for run in runs}) > 1 else []
    return causes or [name for name in found if _lies_in(name, SPEED)]


def _flat(run: RunRecord) -> JsonObject:
    found = {".".join(key): value for key, value in leaves(run.recipe)}
    return {
        key: value
        for key, value in found.items()
        if key != SEED and key.partition(".")[0] not in NO_CAUSE
    }


def _lies_in(name: str, keys: Sequence[tuple[str, ...]]) -> bool:
    parts = tuple(name.split("."))
    return any(parts[: len(key)] == key for key in keys)


def _differ(values: Sequence[Any]) -> bool:
    return len({_text(value) for value in values}) > 1


def _text(value: Any) -> str:
    """Return a value as a text, equal for equal values."""
    return "" if value is MISSING else json.dumps(finite(value), sort_keys=True, default=str)


# -- groups --------------------------------------------------------------------------------


def group_by_seed(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Return runs in groups that are equal but for the seed, in the order of the runs."""
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        found.setdefault(tuple(_text(run.value(key)) for key in keys), []).append(run)
    labels: Counter[str] = Counter()
    groups = []
    for members in found.values():
        label = settings(members[0], keys) or members[0].name
        labels[label] += 1  # values that are equal in the digits shown
        groups.append(Group(f"{label} ({n})" if (n := labels[label]) > 1 else label, members))
    return groups


def once_per_seed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one run of each seed, in the order of the runs: the newest that is finished.

    A run of the same seed again is no further sample of what the seed changes, nor is one that was
    cut off a sample beside finished ones; where none is finished, the newest counts.
    """
    found: dict[str, RunRecord] = {}
    counted = [run for run in runs if run.status == FINISHED] or runs
    for run in sorted(counted, key=lambda run: (run.started, str(run.path))):
        seed = run.value(SEED)
        found[str(run.path) if seed is MISSING else _text(seed)] = run
    return [run for run in runs if any(run is one for one in found.values())]


def settings(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the values of a run, as "optimizer.name=sgd optimizer.lr=0.1", but those it lacks."""
    values = {key: run.value(key) for key in keys}
    return " ".join(f"{key}={cell(one)}" for key, one in values.items() if one is not MISSING)


def metric_names(curves: Iterable[Mapping[str, Curve]], objective: str | None) -> list[str]:
    """Return the curves that runs have, the objective's first, then validation, then training."""
    names = dict.fromkeys(name for found in curves for name in found)
    order = {f"validation/{objective}": 0}
    splits = {"validation": 1, "train": 2}
    return sorted(
        (name for name in names if not name.startswith("test/")),
        key=lambda name: order.get(name, splits.get(name.partition("/")[0], 3)),
    )
