"""`runner compare`: what differs between runs in recipe, code, versions, machine and metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.reporting.filters import leaves
from runner.reporting.run_table import STYLES, cell, damage
from runner.runs import environment, provenance, sessions
from runner.runs.json_files import Fields, JsonObject, finite
from runner.runs.record import MISSING, RunRecord
from runner.training.console import clock, number

# With more runs than these, a run is a row.
MOST_SIDE_BY_SIDE = 5
SECTIONS = ("recipe", "code", "data", "versions", "machine", "result")


@dataclass(frozen=True)
class Compared:
    """Runs and what they do not have in common.

    Attributes:
        names: of the runs, as short as they are different.
        directories: of the runs.
        rows: by section, (key, a value for each run); None where a run lacks the key.
        num_equal: by section, how many keys all runs have in common.
        problems: of each run, what is damaged.
    """

    names: list[str]
    directories: list[str]
    rows: dict[str, list[tuple[str, list[Any]]]]
    num_equal: dict[str, int]
    problems: list[list[str]]


def compare(runs: Sequence[RunRecord]) -> Compared:
    """Return what differs between runs; keys that are equal in all are counted."""
    read: dict[str, Callable[[RunRecord], Fields]] = {
        "recipe": _recipe,
        "code": _code,
        "data": _data,
        "versions": _versions,
        "machine": _machine,
        "result": _result,
    }
    rows, equal = {}, {}
    for section in SECTIONS:
        values = [read[section](run) for run in runs]
        names = list(dict.fromkeys(name for found in values for name in found))
        table = [(name, [found.get(name, MISSING) for found in values]) for name in names]
        if section == "recipe" and not all(run.has_recipe for run in runs):
            table = []  # `problems` names what cannot be read
        rows[section] = [row for row in table if not _same(row[1])]
        equal[section] = len(table) - len(rows[section])
    directories, problems = [str(run.path) for run in runs], [run.problems for run in runs]
    return Compared(short_names(runs), directories, rows, equal, problems)


def _same(values: Sequence[object]) -> bool:
    return all(value == values[0] or _both_nan(value, values[0]) for value in values)


def _both_nan(one: object, other: object) -> bool:
    return isinstance(one, float) and isinstance(other, float) and one != one and other != other


def _recipe(run: RunRecord) -> Fields:
    return {".".join(key): value for key, value in leaves(run.recipe)}


def _code(run: RunRecord) -> Fields:
    found: JsonObject = {}
    git = run.environment.get("git") or {}
    if "dirty" in git:
        found = {"commit": provenance.short_sha(git), "branch": git.get("branch")}
        found["uncommitted changes"] = str(git.get("diff_sha256") or "none")[:8]
    for package, digest in (run.environment.get("code") or {}).items():
        found[f"package {package}"] = str(digest)[:8]
    if kept := sessions.earlier_environments(run.path):
        found["earlier sessions"] = ", ".join(path.name for path in kept)
    return found


def _data(run: RunRecord) -> Fields:
    files = (run.environment.get("data") or {}).items()
    return {f"files of {key}": environment.described_data(one) for key, one in files}


def _versions(run: RunRecord) -> Fields:
    return run.environment.get("packages") or {}


def _machine(run: RunRecord) -> Fields:
    names = ("hostname", "platform", "python", "cpu", "cpu_count", "device")
    found = {name: run.environment.get(name) for name in names if name in run.environment}
    if "num_processes" in run.summary:
        found["processes"] = run.summary["num_processes"]
    return found


def _result(run: RunRecord) -> Fields:
    found: JsonObject = {"status": run.status + damage(run)}
    if run.objective is not None:
        found[f"best validation {run.objective.metric}"] = run.objective.value
    for split, metrics in (run.summary.get("metrics") or {}).items():
        found |= {f"{split} {name}": value for name, value in metrics.items()}
    for name, value in (("step", run.step), ("seconds", run.seconds)):
        if value is not None:
            found[name] = value
    for name in ("samples_per_second", "num_parameters"):
        if name in run.summary:
            found[name] = run.summary[name]
    return found


def short_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return names of runs without the folders that all of them lie in."""
    paths = [str(run.path) for run in runs]
    if len(paths) < 2:
        return [os.path.basename(path) for path in paths]
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common) for path in paths]


# -- output --------------------------------------------------------------------------------


def as_json(compared: Compared) -> str:
    """Return what differs as JSON: by section and key, the values in the order of the runs."""
    rows = {
        section: {key: [None if v is MISSING else v for v in values] for key, values in found}
        for section, found in compared.rows.items()
    }
    content = {"runs": compared.directories, "problems": compared.problems, **rows}
    return json.dumps(finite(content), indent=2, ensure_ascii=False, default=str)


def show(compared: Compared, console: Console) -> None:
    """Print what differs: a run is a column, or a row where there are many."""
    columns, rows, ends = ["", *compared.names], [], []
    for section in SECTIONS:
        found = compared.rows[section]
        for key, values in found:
            rows.append([key, *(shown(key, value) for value in values)])
        ends.append(len(rows))
    if len(compared.names) > MOST_SIDE_BY_SIDE:
        turned = [list(row) for row in zip(columns, *rows, strict=True)]
        columns, rows, ends = turned[0], turned[1:], []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for at, row in enumerate(rows, start=1):
        cells = [Text(value, style=STYLES.get(value.partition(" (")[0], "")) for value in row]
        table.add_row(*cells, end_section=at in ends)
    console.print(table)
    for name, problems in zip(compared.names, compared.problems, strict=True):
        for problem in problems:
            console.print(Text(f"{name}: {problem}", style="red"))
    console.print(Text(_equal(compared), style="dim"))


def shown(key: str, value: Any) -> str:
    """Return a compared value for a table."""
    if value is MISSING:
        return "–"
    if key == "seconds" and isinstance(value, float):
        return clock(value)
    if isinstance(value, float) and not key.count("."):
        return number(value)
    return cell(value)


def _equal(compared: Compared) -> str:
    same = [f"{count} of {name}" for name, count in compared.num_equal.items() if count]
    if not any(compared.rows.values()):
        return "The runs do not differ in anything that they record."
    return f"Equal and left out: {', '.join(same)}." if same else "Nothing is equal."
