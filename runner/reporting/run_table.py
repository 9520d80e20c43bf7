"""`runner list`: a run a row; also as JSON."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.reporting import filters
from runner.runs import record as records
from runner.runs.json_files import JsonObject, finite
from runner.runs.record import MISSING, RunRecord
from runner.training.console import UNLIMITED_COLUMNS, PipedConsole, clock, number

STYLES = {
    records.RUNNING: "bold cyan",
    records.FINISHED: "green",
    records.STOPPED: "yellow",
    records.FAILED: "bold red",
    records.CUT_OFF: "magenta",
    records.SUBMITTED: "cyan",
    records.PRUNED: "dim",
    records.BROKEN: "red",
}
MOST_DAMAGES = 10  # that are named below a table


def newest_first(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return runs by the start of their last attempt."""
    return sorted(runs, key=lambda run: (run.started, str(run.path)), reverse=True)


def in_order(runs: Sequence[RunRecord], key: str) -> list[RunRecord]:
    """Return runs by the values of a key, those without one last; by objective, the best first.

    Objectives of one metric stand together, those of the metric that most runs have first.

    Raises:
        ConfigError: if neither a run nor a recipe has such a key.
    """
    if key == "objective":
        counts = Counter(map(judge_of, runs))
        return sorted(runs, key=lambda run: _rank(run, counts))
    filters.require_keys([key], runs)
    return sorted(runs, key=lambda run: _sort_key(filters.value_of(run, key)))


def _rank(run: RunRecord, counts: Mapping[Any, int]) -> tuple[Any, ...]:
    found = run.objective
    if found is None or not math.isfinite(found.value):  # infinite is never the best
        return (1,)
    value = -found.value if found.mode == "max" else found.value
    # The path: the lowest job of a sweep wins a tie.
    return 0, -counts[judge_of(run)], found.metric, found.mode, value, str(run.path)


def _sort_key(value: Any) -> tuple[int, Any]:
    if value is MISSING or value is None or value != value:
        return 2, 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, value) if is_number else (1, str(value))


def judge_of(run: RunRecord) -> tuple[str, str] | None:
    """Return metric and mode of a run's objective; None: it has none."""
    return None if run.objective is None else (run.objective.metric, run.objective.mode)


def described(run: RunRecord) -> JsonObject:
    """Return a run as plain containers, for programs."""
    objective = run.objective
    return {
        "directory": str(run.path),
        "name": run.name,
        "tags": run.tags,
        "sweep": run.sweep,
        "status": run.status,
        "reason": run.reason,
        "step": run.step,
        "objective": None if objective is None else objective.value,
        "metric": None if objective is None else objective.metric,
        "mode": None if objective is None else objective.mode,
        "seconds": run.seconds,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(run.started)),
        "problems": run.problems,
    }


def as_json(content: object) -> str:
    """Return plain containers as JSON; numbers that JSON does not know become strings."""
    return json.dumps(finite(content), indent=2, ensure_ascii=False, default=str)


def table(*columns: str) -> Table:
    """Return an empty table; long values of a column are folded."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        found.add_column(name, overflow="fold")
    return found


def show(runs: Sequence[RunRecord], keys: Sequence[str], console: Console) -> None:
    """Print runs as a table, with a column for each of the dotted `keys` of their recipes."""
    found = table("name", "status", *keys, "step", "objective", "time", "directory")
    for run in runs:
        objective = run.objective
        best = "" if objective is None else f"{objective.metric} {number(objective.value)}"
        seconds = "" if run.seconds is None else clock(run.seconds)
        values = [cell(run.value(key)) for key in keys]
        step = "" if run.step is None else str(run.step)
        status = Text(run.status, style=STYLES[run.status]).append(damage(run), style="red")
        found.add_row(run.name, status, *values, step, best, seconds, relative(run.path))
    console.print(found)
    show_problems([(relative(run.path), run.problems) for run in runs], console)


def show_problems(damages: Sequence[tuple[str, Sequence[str]]], console: Console) -> None:
    """Print what is damaged of runs, each by its name, a line each, for below a table."""
    lines = [f"{name}: {problem}" for name, problems in damages for problem in problems]
    if len(lines) > MOST_DAMAGES:
        lines[MOST_DAMAGES:] = [f"{len(lines) - MOST_DAMAGES} more; runner show names them."]
    console.print("\n".join(lines), style="red", end="\n" if lines else "")


# -- cells ---------------------------------------------------------------------------------


def damage(run: RunRecord) -> str:
    """Return what is to stand behind a run's status: that its directory is damaged, or nothing."""
    return " (damaged)" if run.problems and run.status != records.BROKEN else ""


def cell(value: Any) -> str:
    """Return a value of a recipe for a table; nothing for a key that it lacks."""
    if value is MISSING:
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return (
        json.dumps(finite(value), default=str) if isinstance(value, list | Mapping) else str(value)
    )


def relative(path: Path) -> str:
    """Return a path from the working directory, where that is shorter."""
    inside = os.path.relpath(path)
    return inside if not inside.startswith("..") else str(path)


def console_for_tables(**options: Any) -> Console:
    """Return a console that prints text as it is, on standard output unless `options` say else.

    One that is no terminal has lines of any length.
    """
    options |= {"markup": False, "emoji": False, "highlight": False}
    found = PipedConsole(**options)
    return found if found.is_terminal else PipedConsole(**{"width": UNLIMITED_COLUMNS} | options)
