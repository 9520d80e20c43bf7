"""Learning curves from metrics.jsonl, groups of runs that differ in their seed, and sparklines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runner.reporting import swept_keys
from runner.run_dir.field_types import number
from runner.run_dir.record import FINISHED, MISSING, RunRecord

# Values of a record that are no metric.
POSITION = ("step", "epoch", "samples", "split", "time")
MOST_POINTS = 120  # of a curve that is drawn
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


def group_by_seed(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Return runs in groups that are equal but for the seed, in the order of the runs."""
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        found.setdefault(tuple(swept_keys.as_text(run, key) for key in keys), []).append(run)
    return [Group(_label(members[0], keys), members) for members in found.values()]


def once_per_seed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one run of each seed, in the order of the runs: the newest that is finished.

    A run of the same seed again is no further sample of what the seed changes, nor is one that was
    cut off a sample beside finished ones; where none is finished, the newest counts.
    """
    found: dict[str, RunRecord] = {}
    counted = [run for run in runs if run.status == FINISHED] or runs
    for run in sorted(counted, key=lambda run: (run.started, str(run.path))):
        seed = run.value(swept_keys.SEED)
        found[str(run.path) if seed is MISSING else swept_keys.as_text(run, swept_keys.SEED)] = run
    return [run for run in runs if any(run is one for one in found.values())]


def _label(run: RunRecord, keys: Sequence[str]) -> str:
    return settings(run, keys) or run.name


def settings(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the values of a run, as "optimizer=sgd optimizer.lr=0.1"; those it lacks left out."""
    from runner.reporting.run_table import cell

    values = {key: swept_keys.value(run, key) for key in keys}
    return " ".join(f"{key}={cell(one)}" for key, one in values.items() if one is not MISSING)


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
