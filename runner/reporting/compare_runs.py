"""`runner compare`: what differs between runs in recipe, code, versions, machine and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rich.console import Console

from runner.reporting import run_table
from runner.reporting.filters import leaves
from runner.runs import environment, provenance
from runner.runs.json_files import Fields, JsonObject
from runner.runs.record import RunRecord

# With more runs than these, a run is a row.
MOST_SIDE_BY_SIDE = 5


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
    if kept := environment.earlier_environments(run.path):
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
    found: JsonObject = {"status": run.status + run_table.damage(run)}
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


SECTIONS: dict[str, Callable[[RunRecord], Fields]] = {
    "recipe": _recipe,
    "code": _code,
    "data": _data,
    "versions": _versions,
    "machine": _machine,
    "result": _result,
}


def compare(runs: Sequence[RunRecord]) -> JsonObject:
    """Return what differs between runs.

    Returns:
        The directories of the ``runs``, the ``problems`` of each (what is damaged), and by section
        the keys that differ, with a value for each run; None: it lacks the key.
    """
    found: JsonObject = {
        "runs": [str(run.path) for run in runs],
        "problems": [run.problems for run in runs],
    }
    for section, read in SECTIONS.items():
        values = [dict(read(run)) for run in runs]
        names = dict.fromkeys(name for one in values for name in one)
        rows = {name: [one.get(name) for one in values] for name in names}
        # `problems` names the recipe that cannot be read.
        readable = section != "recipe" or all(run.has_recipe for run in runs)
        differing = {k: row for k, row in rows.items() if any(one != row[0] for one in row)}
        found[section] = differing if readable else {}
    return found


def show(compared: Fields, console: Console) -> None:
    """Print what differs: a run is a column, or a row where there are many."""
    names = short_names(compared["runs"])
    lines = [["", *names]]
    for section in SECTIONS:
        for key, values in compared[section].items():
            lines.append([key, *("–" if v is None else run_table.cell(v) for v in values)])
    if len(lines) == 1:
        console.print("The runs do not differ in anything that they record.")
    else:
        turned = len(names) > MOST_SIDE_BY_SIDE
        heads, *rows = zip(*lines, strict=True) if turned else lines
        table = run_table.table(*heads)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    run_table.show_problems(list(zip(names, compared["problems"], strict=True)), console)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the names of runs without the folders that all of them lie in."""
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common) for path in paths]
