"""Learning curves from metrics.jsonl, and groups of runs that differ in their seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runner.reporting import swept_keys
from runner.runs.json_files import number
from runner.runs.record import FINISHED, MISSING, RunRecord

# Values of a record that are no metric.
POSITION = ("step", "epoch", "samples", "split", "time")
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
            read = None if name in POSITION else number(value)
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


# -- groups --------------------------------------------------------------------------------


def group_by_seed(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Return runs in groups that are equal but for the seed, in the order of the runs.

    No two have the same label: it has as many digits as that needs.
    """
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        found.setdefault(tuple(swept_keys.as_text(run, key) for key in keys), []).append(run)
    groups = list(found.values())
    short = [settings(members[0], keys) for members in groups]
    used = Counter(short)
    labels: dict[str, int] = {}
    for members, label in zip(groups, short, strict=True):
        text = label if used[label] == 1 else settings(members[0], keys, exact=True)
        text = text or members[0].name
        while text in labels:
            labels[text] += 1
            text = f"{text} ({labels[text]})"
        labels[text] = 1
    return [Group(label, members) for label, members in zip(labels, groups, strict=True)]


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


def settings(run: RunRecord, keys: Sequence[str], *, exact: bool = False) -> str:
    """Return the values of a run, as "optimizer=sgd optimizer.lr=0.1"; those it lacks left out.

    Numbers have six digits, or, if `exact`, all.
    """
    from runner.reporting.run_table import cell

    values = {key: swept_keys.value(run, key) for key in keys}
    return " ".join(
        f"{key}={repr(one) if exact and isinstance(one, float) else cell(one)}"
        for key, one in values.items()
        if one is not MISSING
    )


def metric_names(curves: Iterable[Mapping[str, Curve]], objective: str | None) -> list[str]:
    """Return the curves that runs have, the objective's first, then validation, then training."""
    names = dict.fromkeys(name for found in curves for name in found)
    order: Callable[[str], tuple[bool, bool, bool]] = lambda name: (  # noqa: E731
        name != f"validation/{objective}",
        not name.startswith("validation/"),
        not name.startswith("train/"),
    )
    return sorted((n for n in names if not n.startswith("test/")), key=order)
