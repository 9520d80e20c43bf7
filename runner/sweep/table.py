"""The end of a sweep: `results.csv`, a table, the best job's command, failed jobs. Free of torch.

All of it is derived from `sweep.json` and the runs, and never read back.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, nearest
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.recipe import hydra_setup, paths, plugins
from runner.recipe.plugins import BEST
from runner.runs import json_files
from runner.runs.json_files import PLACE, JsonObject
from runner.runs.record import PRUNED, RunRecord
from runner.sweep.plan import alone, is_setting
from runner.sweep.sweep import Sweep
from runner.training.console import PipedConsole, clock, number

FILE = "results.csv"
MOST_ROWS = 40
STYLES = {"finished": "green", "failed": "red", "stopped": "yellow", "interrupted": "yellow"}
PENDING = "pending"
COLUMNS = ("status", "objective", "best_step", "step", "seconds", "run_dir")
Objective = float | list[float] | None


@dataclass(frozen=True)
class Row:
    """One job of a sweep.

    Attributes:
        job: its number.
        overrides: of the job.
        run: its run, which may not be there yet.
        metrics: the objectives of a search, with their modes; empty: the run's own decides.
    """

    job: int
    overrides: tuple[str, ...]
    run: RunRecord
    metrics: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[str, str]:
        """The overrides by key."""
        return dict(found for one in self.overrides if (found := _value(one)) is not None)

    @cached_property
    def status(self) -> str:
        """That of the run."""
        return self.run.status if self.run.path.exists() else PENDING

    @cached_property
    def judged_by(self) -> tuple[str, str] | None:
        """The metric of the objective and its mode; None: there are none, or several."""
        if not self.is_own:
            return next(iter(self.metrics.items())) if len(self.metrics) == 1 else None
        found = self.run.objective if self.run.is_done else None
        return None if found is None else (found.metric, found.mode)

    @property
    def is_own(self) -> bool:
        """Whether the objective is that of the run itself."""
        return not self.metrics or list(self.metrics) == [BEST]

    @cached_property
    def objective(self) -> Objective:
        """The value of a job that is done, or those of a search; None: there is none."""
        if not self.run.is_done:
            return None
        if self.is_own:
            return None if self.run.objective is None else self.run.objective.value
        try:
            found = values_of(self.run, list(self.metrics))
        except ConfigError:  # the search has said so
            return None
        return found if len(found) > 1 else found[0]

    def field(self, name: str) -> object:
        """Return a value of the summary of a run that is done; "" without one."""
        if not self.run.is_done:
            return ""
        best = self.run.summary.get("best") or {}
        value = best.get("step") if name == "best_step" else self.run.summary.get(name)
        return "" if value is None or (name == "best_step" and not self.is_own) else value

    @property
    def is_no_number(self) -> bool:
        """Whether the job lacks its objective, or has one that is NaN or infinite.

        A run that measures nothing is judged by nothing, unless a search has chosen it.
        """
        found = self.objective
        if found is None or self.status == PRUNED:
            return bool(self.metrics) and self.status != PRUNED
        return not all(map(math.isfinite, found if isinstance(found, list) else [found]))


# -- objectives of a search ----------------------------------------------------------------


def values_of(run: RunRecord, metrics: Sequence[str]) -> list[float]:
    """Return the objectives of a run that is done, as `hydra.sweeper.metrics` names them.

    One of a split is the last measured value: not every evaluation need have it.

    Raises:
        ConfigError: if the run measures no such metric.
    """
    return [_value_of(run, metric) for metric in metrics]


def _value_of(run: RunRecord, metric: str) -> float:
    if metric in plugins.NUMBERS:
        value = run.summary.get(metric)
        return math.nan if value is None else float(value)
    if metric == BEST and run.objective is not None:
        return run.objective.value
    measured = _measured(run)
    if metric not in measured:
        rule = f"the run measures {', '.join(measured) or 'nothing'}"
        raise ConfigError.of(f"{plugins.SWEEPER}.metrics={metric}", rule, nearest(metric, measured))
    return float(measured[metric])


def _measured(run: RunRecord) -> JsonObject:
    """Return by "<split>/<metric>" the last measured value, from metrics.jsonl."""
    found: JsonObject = {}
    for record in run.records():
        for key, value in record.items():
            if key not in PLACE and value is not None and record.get("split") in plugins.SPLITS:
                found[f"{record['split']}/{key}"] = value
    return found


# -- results -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The rows of a sweep, best first, and the keys that differ between them.

    Where jobs are judged by different metrics, `metric` and `mode` are empty: values of different
    metrics have no order, so that rows are sorted by number and none is best.
    """

    rows: list[Row]
    swept: list[str]
    metric: str
    mode: str
    folder: str
    metrics: tuple[str, ...] = ()
    """The metrics with their modes, where jobs are judged by several."""

    @property
    def best(self) -> Row | None:
        """The finished job with the best objective; None: no single objective was measured."""
        if self.metrics:
            return None
        scored = (row for row in self.rows if _rank(row.objective, self.mode)[0] == 0)
        return next((row for row in scored if row.status != PRUNED), None)


def results(sweep: Sweep) -> Results:
    """Return the results of a sweep."""
    there = sweep.description
    known = {number: job.overrides for number, job in enumerate(there.jobs)}
    metrics = dict(zip(*(there.search.get(k) or () for k in ("metrics", "modes")), strict=True))
    rows = []
    for job in sorted(known) or sweep.started():
        run = RunRecord(sweep.run_dir(job))
        given = known.get(job) or tuple(run.job.get("overrides") or ())
        rows.append(Row(job, given, run, metrics))
    judged = dict.fromkeys(one for row in rows if (one := row.judged_by))
    if len(judged) > 1:
        names = tuple(f"{metric} ({mode})" for metric, mode in judged)
        return Results(rows, _swept(rows), "", "", str(sweep.path), names)
    metric, mode = next(iter(judged), ("", "min"))
    rows.sort(key=lambda row: (_rank(row.objective, mode), row.job))
    return Results(rows, _swept(rows), metric, mode, str(sweep.path))


@functools.lru_cache(maxsize=4096)  # most jobs have most overrides in common
def _value(override: str) -> tuple[str, str] | None:
    key = hydra_setup.key_of(override)
    if key.startswith("hydra") or is_setting(override):
        return None
    return key, "null" if override.startswith("~") else override.partition("=")[2]


def _swept(rows: Sequence[Row]) -> list[str]:
    """Return the keys that have not one value in all jobs."""
    keys = dict.fromkeys(key for row in rows for key in row.values)
    return [key for key in keys if len({row.values.get(key) for row in rows}) > 1]


def _rank(objective: Objective, mode: str) -> tuple[int, float]:
    if not isinstance(objective, float):
        return (1 if isinstance(objective, list) else 3), 0.0
    if not math.isfinite(objective):
        return 2, 0.0
    return 0, -objective if mode == "max" else objective


def write_csv(sweep: Sweep, found: Results) -> None:
    """Write the rows of a sweep, by number, to its `results.csv`, unless they stand there.

    Raises:
        OSError: if it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *found.swept, *COLUMNS])
    for row in sorted(found.rows, key=lambda row: row.job):
        objective = row.objective
        shown = " ".join(map(repr, objective)) if isinstance(objective, list) else objective
        values = [row.values.get(key, "") for key in found.swept]
        numbers = [row.field(name) for name in ("best_step", "step", "seconds")]
        end = [row.status, "" if shown is None else shown, *numbers, f"{row.job:04}"]
        writer.writerow([row.job, *values, *end])
    path, content = sweep.path / FILE, text.getvalue().encode(errors="replace")
    if not path.is_file() or path.read_bytes() != content:
        checkpoints.write_atomically(path, content)


def _table(found: Results) -> Table:
    """Return the best rows as a table: the swept keys, objective, step, time."""
    name = f"{found.metric} ({found.mode})" if found.metric else "objective"
    result = Table(box=box.SIMPLE, title=found.folder, title_justify="left", title_style="dim")
    result.add_column("job", no_wrap=True)
    for key in found.swept:
        result.add_column(key, overflow="fold")
    result.add_column("status", no_wrap=True)
    for column in (name, "best step", "time"):
        result.add_column(column, justify="right", overflow="fold")
    for row in found.rows[:MOST_ROWS]:
        value = row.objective
        measured = [value] if isinstance(value, float) else value or []
        unit = f"{row.judged_by[0]} " if found.metrics and row.judged_by else ""
        seconds = row.field("seconds")
        result.add_row(
            f"{row.job:04}",
            *(Text(row.values.get(key, "")) for key in found.swept),
            Text(row.status, style=STYLES.get(row.status, "")),
            Text(unit + "  ".join(map(number, measured))),
            str(row.field("best_step")),
            clock(float(seconds)) if isinstance(seconds, (int, float)) else "",
        )
    return result


def show(found: Results, command: str, console: Console) -> None:
    """Print the table, and the command that trains the best job alone."""
    console.print(_table(found))
    left = len(found.rows) - MOST_ROWS
    if left > 0:
        console.print(f"and {left} more in {found.folder}/{FILE}", markup=False, soft_wrap=True)
    if found.metrics:
        shown = ", ".join(found.metrics)
        console.print(
            f"No job is best: they are judged by different metrics, {shown}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if found.best is not None:
        console.print(f"best: job {found.best.job:04}", markup=False, highlight=False)
        console.print(
            f"  {command_of(found.best, command)}", markup=False, highlight=False, soft_wrap=True
        )


def command_of(row: Row, config_name: str) -> str:
    """Return the command line that trains a job's recipe alone."""
    return alone([one for one in row.overrides if not _is_of_launchers(one)], config_name)


def _is_of_launchers(override: str) -> bool:
    key = hydra_setup.key_of(override).replace("/", ".")
    return key.startswith(("hydra.launcher", "hydra.sweeper")) or is_setting(override)


# -- the end of a command ------------------------------------------------------------------


def nothing_left(sweep: Sweep, config_name: str) -> int:
    """Show a sweep in which nothing is left to do, and return the exit code."""
    code = _shown(sweep, config_name, results(sweep))
    print(f"{sweep.path} is finished. Nothing is left to do; sweep.dir=DIR begins a new one.")
    return code


def conclude(sweep: Sweep, config_name: str, *, is_stopped: bool = False) -> int:
    """Write and show the results; print which jobs failed, and return the code of the sweep.

    It is that of a failure as soon as one job has failed, however other jobs have ended.
    """
    found = results(sweep)
    code = _shown(sweep, config_name, found)
    _tell_other_code(found)
    left = sorted((row for row in found.rows if not row.run.is_done), key=lambda row: row.job)
    codes = {row.job: row.run.tried.get("code", FAILED) for row in left}
    unstarted = [row.job for row in left if row.status == PENDING]
    stopped = [job for job, one in codes.items() if one in (STOPPED, INTERRUPTED)]
    failed = [job for job in codes if job not in (*unstarted, *stopped)]
    if is_stopped:
        unstarted = []
    for some, what in ((failed, "failed"), (unstarted, "were not started")):
        if some:
            names = ", ".join(f"{number:04}" for number in some)
            print(f"{len(some)} of {len(found.rows)} jobs {what}: {names}", file=sys.stderr)
    if failed or unstarted or code != DONE:
        return FAILED
    return max((codes[job] for job in stopped), default=DONE)


def _shown(sweep: Sweep, config_name: str, found: Results) -> int:
    """Write `results.csv` and show the table; return the exit code of what is wrong with them.

    A file that cannot be written hides neither the table nor which jobs have failed.
    """
    code = DONE
    try:
        write_csv(sweep, found)
    except OSError as error:
        told = f"Warning: {FILE} is not written: {paths.failure(error)} ({sweep.path})"
        print(f"{told}. The same command again writes it.", file=sys.stderr, flush=True)
        code = FAILED
    show(found, config_name, PipedConsole(highlight=False))
    rows = [row.job for row in found.rows if row.run.is_done and row.is_no_number]
    if rows:
        names = ", ".join(f"{job:04}" for job in sorted(rows))
        told = "their objectives are no finite numbers, and the same command does not train them"
        count = f"{len(rows)} of {len(found.rows)} jobs finished"
        print(f"{count}, but {told}: {names}", file=sys.stderr)
        code = FAILED
    return code


def _tell_other_code(found: Results) -> None:
    """Say which jobs were trained with other code than the first: files were edited meanwhile."""
    codes: dict[str, list[int]] = {}
    for row in sorted(found.rows, key=lambda row: row.job):
        if row.run.is_done:
            code = json_files.digest(row.run.environment.get("code"))
            codes.setdefault(code, []).append(row.job)
    for other in list(codes.values())[1:]:
        first, names = next(iter(codes.values()))[0], ", ".join(f"{job:04}" for job in other)
        told = f"trained with other Python code than job {first:04}, which has changed meanwhile"
        print(f"{len(other)} of {len(found.rows)} jobs were {told}: {names}", file=sys.stderr)
