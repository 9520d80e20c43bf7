"""What a report shows of runs: curves, groups, the objective, importance, timing, memory."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accel.machine.errors import ConfigError
from runner.reporting import curves, swept_keys
from runner.reporting.curves import MOST_POINTS, Band, Curve, Group
from runner.reporting.importance import Importance, importance
from runner.reporting.run_table import damage, judge_of, newest_first
from runner.run_dir import record as records
from runner.run_dir import study
from runner.run_dir.field_types import number
from runner.run_dir.record import RunRecord
from runner.training import console

# Values of training that are no learning curve.
NO_CURVE = ("lr", "samples_per_second", "skipped_steps")
SEEDS_NOTE = (
    "Mean and standard deviation are over seeds: of several runs of a seed, the newest counts that "
    "is finished. Runs that are not finished count where no run of the group is. Runs of different "
    "code, data or earlier recipes are different groups. A seed whose value is NaN or infinite is "
    "in no mean."
)
MOST_METRICS = 8
MOST_KEYS = 12
Judge = tuple[str, str]  # metric and mode of an objective


@dataclass(frozen=True)
class Findings:
    """Runs, read for a report.

    Attributes:
        runs: the best first; behind them those that another metric judges, then those without an
            objective.
        keys: in which they differ, the seed apart, by `swept_keys`; at most `MOST_KEYS`.
        num_keys: how many such keys there are.
        groups: of runs that are equal but for the seed.
        curves: by directory of a run, its curves by ``<split>/<metric>``.
        metrics: the names of the curves to show, the objective's first.
        importance: of the keys.
        judged_by: metric and mode of the objective that most runs have; None: none has any.
        searched_by: the objectives of the searches that made runs, where they are others.
    """

    runs: list[RunRecord]
    keys: list[str]
    num_keys: int
    groups: list[Group]
    curves: dict[str, dict[str, Curve]]
    metrics: list[str]
    importance: Importance
    judged_by: Judge | None = None
    searched_by: tuple[str, ...] = ()

    @property
    def judged(self) -> list[RunRecord]:
        """The runs whose objective is of the one metric that is compared, the best first."""
        return _judged(self.runs, self.judged_by)

    @property
    def summary(self) -> str:
        """How many runs there are by status, and what they are compared by, where that differs."""
        parts = [counted_statuses(self.runs)]
        others = [run for run in self.runs if is_judged(run) and judge_of(run) != self.judged_by]
        if self.judged_by is not None and (others or self.searched_by):
            parts.append(f"the objective is {_named(self.judged_by)} of the validation")
            names = ", ".join(
                dict.fromkeys(_named(one) for run in others if (one := judge_of(run)))
            )
            parts += [f"not compared with it: {len(others)} by {names}"] if others else []
            searched = ", ".join(self.searched_by)
            parts += [f"the search judged by {searched}: see its results.csv"] if searched else []
        return "; ".join(parts)

    def bands(self, metric: str, most: int = MOST_POINTS) -> dict[str, Band]:
        """Return a metric's band by the label of each group that has measured it."""
        found = {}
        for group in self.groups:
            measured = [run for run in group.runs if metric in self.curves[str(run.path)]]
            chosen = curves.once_per_seed(measured)
            present = [self.curves[str(run.path)][metric] for run in chosen]
            if present:
                found[group.label] = curves.band(present, most)
        return found


def is_judged(run: RunRecord) -> bool:
    """Return whether a run has an objective that is a number."""
    return run.objective is not None and math.isfinite(run.objective.value)


def find(runs: Sequence[RunRecord]) -> Findings:
    """Read runs for a report."""
    newest = newest_first(runs)
    judges = Counter(one for run in newest if is_judged(run) and (one := judge_of(run)))
    judge = judges.most_common(1)[0][0] if judges else None
    ordered = sorted(in_name_order(newest), key=lambda run: _rank(run, judge))
    readable = [run for run in ordered if run.status != records.BROKEN]
    every = swept_keys.find([run for run in readable if run.has_recipe])
    keys = every[:MOST_KEYS]
    groups = curves.group_by_seed(readable, every)
    read = {str(run.path): curves.read_curves(run) for run in readable}
    metric = next((run.objective.metric for run in ordered if run.objective is not None), None)
    names = [
        name
        for name in curves.metric_names(read.values(), metric)
        if name.partition("/")[2] not in NO_CURVE
    ]
    counted = [run for group in groups for run in curves.once_per_seed(group.runs)]
    compared = _judged(in_name_order(counted), judge)
    found = importance(compared, swept_keys.vary(keys, compared))
    shown = names[:MOST_METRICS]
    searched = tuple(_searched_by(newest, judge))
    return Findings(ordered, keys, len(every), groups, read, shown, found, judge, searched)


def _searched_by(runs: Sequence[RunRecord], judge: Judge | None) -> Iterator[str]:
    """Yield the objectives of the searches of runs that are not the one they are compared by."""
    same = () if judge is None else (study.BEST, f"{study.VALIDATION}/{judge[0]}")
    for folder in dict.fromkeys(run.path.parent for run in runs):
        try:
            search = study.of_sweep(folder)
        except ConfigError:  # damaged: the sweep that goes on says so
            continue
        if search is not None and set(search.metrics).difference(same):
            yield ", ".join(map(_named, zip(search.metrics, search.modes, strict=False)))


def _named(judge: Judge) -> str:
    return f"{judge[0]} ({judge[1]})"


def _judged(runs: Sequence[RunRecord], judge: Judge | None) -> list[RunRecord]:
    return [run for run in runs if is_judged(run) and judge_of(run) == judge]


def in_name_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return runs with those that have an objective by directory: the lowest job wins a tie."""
    judged = sorted((run for run in runs if is_judged(run)), key=lambda run: str(run.path))
    return [*judged, *(run for run in runs if not is_judged(run))]


def _rank(run: RunRecord, judge: Judge | None) -> tuple[int, float]:
    if not is_judged(run) or run.objective is None:
        return 2, 0.0
    value = -run.objective.value if run.objective.mode == "max" else run.objective.value
    return int(judge_of(run) != judge), value


def shown_objective(run: RunRecord, judge: Judge | None) -> str:
    """Return the objective for a table, with its metric where that is not the one compared."""
    if run.objective is None:
        return ""
    value = console.number(run.objective.value)
    return value if judge_of(run) == judge else f"{run.objective.metric} {value}"


def counted_statuses(runs: Sequence[RunRecord]) -> str:
    """Return e.g. "12 runs: 9 finished, 1 finished (damaged), 2 failed"."""
    counts = Counter((run.status, damage(run)) for run in runs)
    order = sorted(counts, key=lambda one: (records.STATUSES.index(one[0]), one[1]))
    parts = [f"{counts[status, damaged]} {status}{damaged}" for status, damaged in order]
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {', '.join(parts)}"


@dataclass(frozen=True)
class Spread:
    """The objective over seeds; which runs count: `curves.once_per_seed`.

    Attributes:
        mean: of those that are finite numbers; None: there is none.
        deviation: their standard deviation; None: there are no two.
        seeds: how many seeds there are, and of how many there is no objective, or no finite one.
    """

    mean: float | None
    deviation: float | None
    seeds: str


def spread(runs: Sequence[RunRecord]) -> Spread:
    """Return the objective over the seeds of a group."""
    counted = curves.once_per_seed(runs)
    measured = [run.objective.value for run in counted if run.objective is not None]
    values = [value for value in measured if math.isfinite(value)]
    return Spread(
        statistics.fmean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
        curves.counted(len(counted), len(measured) - len(values), len(counted) - len(measured)),
    )


def throughput(run: RunRecord) -> float | None:
    """Return the samples per second of a run."""
    found = number(run.summary.get("samples_per_second"))
    return found if found is not None else number(run.last.get("samples_per_second"))


def peak_memory(run: RunRecord) -> float | None:
    """Return the most bytes that the main process held: on its accelerator, else in memory."""
    found = run.summary.get("memory") or {}
    on_device = number(found.get("device"))
    return on_device if on_device is not None else number(found.get("process"))
