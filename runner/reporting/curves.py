"""Learning curves from metrics.jsonl, groups of runs that differ in their seed, and sparklines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.config import resumed_recipe
from runner.reporting.filters import leaves
from runner.run_dir.field_types import number
from runner.run_dir.json_files import JsonObject, finite
from runner.run_dir.record import CODE, FINISHED, MISSING, RunRecord

# Values of a record that are no metric.
POSITION = ("step", "epoch", "samples", "split", "time")
MOST_POINTS = 120  # of a curve that is drawn
SEED = "seed"
# Keys of a recipe that change nothing of what a run computes, and how fast it is, neither.
NO_CAUSE = ("name", "output_dir", "tags", "resume", "run_dir", "tracker", "profile", "submit")
# Of the other keys that `resume=auto` ignores, those that are worth a look on their own.
SPEED = (("distributed", "num_processes"), ("dataloader",))
BLOCKS = "▁▂▃▄▅▆▇█"

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

    @property
    def num_seeds(self) -> int:
        """How many different seeds have a run that counts."""
        return len(once_per_seed(self.runs))


@dataclass(frozen=True)
class Band:
    """A curve of a group [points]: the mean over its seeds, and the lowest and highest value.

    `num_runs` is how many runs it is of; with one, all three are equal.
    """

    steps: Array
    mean: Array
    low: Array
    high: Array
    num_runs: int


def read_curves(run: RunRecord) -> dict[str, Curve]:
    """Return the curves of a run by ``<split>/<metric>``; lines that are damaged are left out."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for record in run.records():
        split, step = record.get("split"), number(record.get("step"))
        if step is None:
            continue
        for name, value in record.items():
            read = None if name in POSITION else number(value)
            if read is not None:
                steps, values = found.setdefault(f"{split}/{name}", ([], []))
                steps.append(step)
                values.append(read)
    return {name: Curve(np.array(s), np.array(v)) for name, (s, v) in found.items()}


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return a curve of at most `most` points: means over equal ranges of its points."""
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
    rows = [_at(thinned(curve, most), steps) for curve in curves]
    stacked = np.vstack(rows)
    known = np.isfinite(stacked).any(axis=0)
    stacked, steps = stacked[:, known], steps[known]
    if not len(steps):
        empty = np.array([])
        return Band(empty, empty, empty, empty, len(curves))
    mean, low, high = (f(stacked, axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
    return Band(steps, mean, low, high, len(curves))


def _at(curve: Curve, steps: Array) -> Array:
    finite = np.isfinite(curve.values)
    if not finite.any():
        return np.full(len(steps), math.nan)
    inside = curve.steps[finite], curve.values[finite]
    return np.interp(steps, *inside, left=math.nan, right=math.nan)


# -- groups --------------------------------------------------------------------------------


def swept_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the dotted keys in which the recipes of runs differ, the seed not among them.

    Where the runs were made by different code, the key `CODE` is one of them.

    Keys that only say where a run is computed do not count. How many processes and workers there
    are counts where nothing else differs.
    """
    recipes = [_flat(run) for run in runs]
    names = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    different = [
        name for name in names if len({_hashed(r.get(name, MISSING)) for r in recipes}) > 1
    ]
    causes = [name for name in different if not _lies_in(name, resumed_recipe.ELSEWHERE)]
    causes += [CODE] if len({run.code for run in runs}) > 1 else []
    return causes or [name for name in different if _lies_in(name, SPEED)]


def _lies_in(name: str, keys: Sequence[tuple[str, ...]]) -> bool:
    parts = tuple(name.split("."))
    return any(parts[: len(key)] == key for key in keys)


def _flat(run: RunRecord) -> JsonObject:
    found = {".".join(key): value for key, value in leaves(run.recipe)}
    return {
        key: value
        for key, value in found.items()
        if key != SEED and key.partition(".")[0] not in NO_CAUSE
    }


def _hashed(value: Any) -> str:
    return "" if value is MISSING else json.dumps(finite(value), sort_keys=True, default=str)


def group_by_seed(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Return runs in groups that are equal but for the seed, in the order of the runs."""
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        found.setdefault(tuple(_hashed(run.value(key)) for key in keys), []).append(run)
    return [Group(_label(members[0], keys), members) for members in found.values()]


def once_per_seed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one run of each seed, in the order of the runs: the newest that is finished.

    A run of the same seed again is no further sample of what the seed changes, nor is one that was
    cut off a sample beside finished ones; where none is finished, the newest counts.
    """
    found: dict[str, RunRecord] = {}
    counted = [run for run in runs if run.status == FINISHED] or runs
    for run in sorted(counted, key=lambda run: (run.started, str(run.path))):
        seed = run.value(SEED)
        found[str(run.path) if seed is MISSING else _hashed(seed)] = run
    return [run for run in runs if any(run is one for one in found.values())]


def _label(run: RunRecord, keys: Sequence[str]) -> str:
    from runner.reporting.run_table import cell

    parts = [f"{key}={cell(run.value(key))}" for key in keys if run.value(key) is not MISSING]
    return " ".join(parts) or run.name


def metric_names(curves: Iterable[Mapping[str, Curve]], objective: str | None) -> list[str]:
    """Return the curves that runs have, the objective's first, then validation, then training."""
    names = dict.fromkeys(name for found in curves for name in found)
    order: Callable[[str], tuple[bool, bool, bool]] = lambda name: (  # noqa: E731
        name != f"validation/{objective}",
        not name.startswith("validation/"),
        not name.startswith("train/"),
    )
    return sorted((n for n in names if not n.startswith("test/")), key=order)


# -- in text -------------------------------------------------------------------------------


def sparkline(values: Sequence[float] | Array, width: int = 40) -> str:
    """Return values as a line of blocks; the lowest is ▁, the highest █, a gap is a space."""
    thin = thinned(Curve(np.arange(len(values), dtype=float), np.array(values, float)), width)
    finite = thin.values[np.isfinite(thin.values)]
    if not len(finite):
        return ""
    low, high = float(finite.min()), float(finite.max())
    span = high - low
    return "".join(
        " "
        if not math.isfinite(value)
        else BLOCKS[int((value - low) / span * 7.999)]
        if span > 0
        else BLOCKS[0]
        for value in thin.values
    )
