"""`runner list` and `runner eval` of several runs: a run a row; also as JSON."""

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

from accel.machine.errors import ConfigError, nearest
from runner.reporting import filters
from runner.runs import record as records
from runner.runs.json_files import Fields, JsonObject, finite
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


def in_order(runs: Sequence[RunRecord], key: str, reverse: bool = False) -> list[RunRecord]:
    """Return runs by the values of a key, those without one last; by objective, the best first.

    An infinite objective is never the best: it stands behind the finite ones of its metric. Those
    of other metrics than most runs have stand behind these, by metric: they do not compare.

    Raises:
        ConfigError: if neither a run nor a recipe has such a key.
    """
    one = filters.Filter(key, "=", ())
    if key in filters.TIMES or (key not in filters.FIELDS and key != "name"):
        known = [name for name in filters.FIELDS]
        if key in filters.TIMES:
            raise ConfigError.of(f"--sort {key}", "it is a filter", nearest("started", known))
        filters.require_keys([key], runs)
    known_last = [run for run in runs if _missing(one.of(run))]
    rest = [run for run in runs if not _missing(one.of(run))]
    if key == "objective":
        rest.sort(key=lambda run: str(run.path))  # the lowest job of a sweep wins a tie
    ordered = sorted(rest, key=lambda run: _sort_key(run, key, one.of(run)), reverse=reverse)
    if key == "objective":
        finite = [run for run in newest_first(ordered) if math.isfinite(one.of(run))]
        metrics = [name for name, _ in Counter(map(judge_of, finite)).most_common()]
        places = {name: place for place, name in enumerate(metrics)}
        ordered.sort(key=lambda run: places.get(judge_of(run), len(places)))
    return [*ordered, *known_last]


def judge_of(run: RunRecord) -> tuple[str, str] | None:
    """Return metric and mode of a run's objective; None: it has none."""
    return None if run.objective is None else (run.objective.metric, run.objective.mode)


def _missing(value: Any) -> bool:
    return value is MISSING or value is None or (isinstance(value, float) and math.isnan(value))


def _sort_key(run: RunRecord, key: str, value: Any) -> tuple[int, Any]:
    if key == "objective" and run.objective is not None:
        if math.isinf(value):
            return 1, 0.0
        return 0, -value if run.objective.mode == "max" else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value)
    return 1, str(value)


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


def as_json(runs: Sequence[RunRecord]) -> str:
    """Return runs as a JSON list."""
    return json.dumps(finite([described(run) for run in runs]), indent=2, ensure_ascii=False)


def show(
    runs: Sequence[RunRecord], keys: Sequence[str] = (), console: Console | None = None
) -> None:
    """Print runs as a table, with a column for each of the dotted `keys` of their recipes."""
    console = console or console_for_tables()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, shown in (("name", True), ("tags", any(run.tags for run in runs))):
        if shown:
            table.add_column(name, overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in keys:
        table.add_column(name, overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("objective", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("directory", overflow="fold")
    for run in runs:
        table.add_row(*_cells(run, keys, any(run.tags for run in runs)))
    console.print(table)
    show_problems(runs, console)


def show_problems(runs: Sequence[RunRecord], console: Console) -> None:
    """Print what is damaged of runs, a line each, for below a table."""
    damaged = [(relative(run.path), one) for run in runs for one in run.problems]
    for where, problem in damaged[:MOST_DAMAGES]:
        console.print(Text(f"{where}: {problem}", style="red"))
    if len(damaged) > MOST_DAMAGES:
        console.print(Text(f"{len(damaged) - MOST_DAMAGES} more damages; runner show names them."))


def _cells(run: RunRecord, keys: Sequence[str], tagged: bool) -> list[Text]:
    objective = run.objective
    shown = "" if objective is None else f"{objective.metric} {number(objective.value)}"
    seconds = "" if run.seconds is None else clock(run.seconds)
    cells = [Text(run.name)]
    cells += [Text(", ".join(run.tags))] if tagged else []
    cells.append(status_text(run))
    cells += [Text(cell(run.value(key))) for key in keys]
    cells += [Text("" if run.step is None else str(run.step)), Text(shown), Text(seconds)]
    return [*cells, Text(relative(run.path))]


# -- evaluations ---------------------------------------------------------------------------


def show_evaluations(rows: Sequence[tuple[Path, Fields | str]], console: Console) -> None:
    """Print evaluations; below them why a run could not be measured, and what to know of others.

    Args:
        rows: (run directory, its evaluation as `Evaluation` has it, or the reason).
        console: where to.
    """
    measured = [found for _, found in rows if not isinstance(found, str)]
    names = list(
        dict.fromkeys(
            (split, name)
            for found in measured
            for split, metrics in found["metrics"].items()
            for name in metrics
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("step", justify="right")
    for split, name in names:
        table.add_column(f"{split} {name}", justify="right", no_wrap=True)
    if any(isinstance(found, str) or found["notes"] for _, found in rows):
        table.add_column("", no_wrap=True)
    for run_dir, found in rows:
        table.add_row(*_evaluation_cells(run_dir, found, names))
    console.print(table)
    for run_dir, found in rows:
        if isinstance(found, str):
            console.print(Text(f"{relative(run_dir)}: failed: {found}", style="red"))
        else:
            for note in found["notes"]:
                console.print(Text(f"{relative(run_dir)}: {note}", style="yellow"))


def _evaluation_cells(
    run_dir: Path, found: Fields | str, names: Sequence[tuple[str, str]]
) -> list[Text]:
    if isinstance(found, str):
        empty = [Text("")] * (1 + len(names))
        return [Text(relative(run_dir)), *empty, Text("failed", style="red")]
    step = found["step"]
    cells = [Text(relative(run_dir)), Text("" if step is None else str(step))]
    for split, name in names:
        value = found["metrics"].get(split, {}).get(name)
        cells.append(Text("" if value is None else number(value)))
    return [*cells, Text("see below", style="yellow")] if found["notes"] else cells


# -- cells ---------------------------------------------------------------------------------


def damage(run: RunRecord) -> str:
    """Return what is to stand behind a run's status: that its directory is damaged, or nothing."""
    return " (damaged)" if run.problems and run.status != records.BROKEN else ""


def status_text(run: RunRecord) -> Text:
    """Return a run's status for a table, with its `damage`."""
    return Text(run.status, style=STYLES[run.status]).append(damage(run), style="red")


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


def console_for_tables() -> Console:
    """Return a console on standard output; one that is no terminal has lines of any length."""
    console = PipedConsole(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = PipedConsole(highlight=False, soft_wrap=False, width=UNLIMITED_COLUMNS)
    return console
