"""What a report shows of runs: curves, groups, the objective, importance, timing, memory."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runner.reporting import curves
from runner.reporting.curves import Band, Curve, Group
from runner.reporting.importance import Importance, importance
from runner.reporting.run_table import newest_first
from runner.run_dir import record as records
from runner.run_dir.record import RunRecord, number

# Values of training that are no learning curve.
NO_CURVE = ("lr", "samples_per_second", "skipped_steps")
MOST_METRICS = 8
MOST_KEYS = 12


@dataclass(frozen=True)
class Findings:
    """Runs, read for a report.

    Attributes:
        runs: the best first, those without an objective last.
        keys: in which their recipes differ, the seed apart; at most `MOST_KEYS`.
        num_keys: how many such keys there are.
        groups: of runs that are equal but for the seed.
        curves: by directory of a run, its curves by ``<split>/<metric>``.
        metrics: the names of the curves to show, the objective's first.
        importance: of the keys.
    """

    runs: list[RunRecord]
    keys: list[str]
    num_keys: int
    groups: list[Group]
    curves: dict[str, dict[str, Curve]]
    metrics: list[str]
    importance: Importance

    @property
    def judged(self) -> list[RunRecord]:
        """The runs with an objective, the best first."""
        return [run for run in self.runs if is_judged(run)]

    def bands(self, metric: str) -> dict[str, Band]:
        """Return a metric's band by the label of each group that has measured it."""
        found = {}
        for group in self.groups:
            own = [self.curves[str(run.path)].get(metric) for run in group.runs]
            present = [curve for curve in own if curve is not None]
            if present:
                found[group.label] = curves.band(present)
        return {label: one for label, one in found.items() if len(one.steps)}


def is_judged(run: RunRecord) -> bool:
    """Return whether a run has an objective that is a number."""
    return run.objective is not None and math.isfinite(run.objective.value)


def find(runs: Sequence[RunRecord]) -> Findings:
    """Read runs for a report."""
    ordered = sorted(newest_first(runs), key=_rank)
    readable = [run for run in ordered if run.status != records.BROKEN]
    every = curves.swept_keys(readable)
    keys = every[:MOST_KEYS]
    groups = curves.group_by_seed(readable, every)
    read = {str(run.path): curves.read_curves(run) for run in readable}
    metric = next((run.objective.metric for run in ordered if run.objective is not None), None)
    names = [
        name
        for name in curves.metric_names(read.values(), metric)
        if name.partition("/")[2] not in NO_CURVE
    ]
    found = importance([run for run in ordered if is_judged(run)], keys)
    return Findings(ordered, keys, len(every), groups, read, names[:MOST_METRICS], found)


def _rank(run: RunRecord) -> tuple[bool, float]:
    if not is_judged(run) or run.objective is None:
        return True, 0.0
    return False, -run.objective.value if run.objective.mode == "max" else run.objective.value


def counted_statuses(runs: Sequence[RunRecord]) -> str:
    """Return e.g. "12 runs: 10 finished, 2 failed"."""
    counts = Counter(run.status for run in runs)
    parts = [f"{counts[status]} {status}" for status in records.STATUSES if counts[status]]
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {', '.join(parts)}"


def spread(runs: Sequence[RunRecord]) -> tuple[float, float] | None:
    """Return mean and standard deviation (0 of one run) of the objective; None: there is none."""
    values = [run.objective.value for run in runs if is_judged(run) and run.objective is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def throughput(run: RunRecord) -> float | None:
    """Return the samples per second of a run."""
    found = number(run.summary.get("samples_per_second"))
    return found if found is not None else number(run.last.get("samples_per_second"))


def peak_memory(run: RunRecord) -> float | None:
    """Return the most bytes that the main process held: on its accelerator, else in memory."""
    found = run.summary.get("memory") or {}
    on_device = number(found.get("device"))
    return on_device if on_device is not None else number(found.get("process"))
