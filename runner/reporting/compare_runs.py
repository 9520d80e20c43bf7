"""`runner compare`: what differs between runs in recipe, code, versions, machine and metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from runner.reporting import describe_run, run_table
from runner.reporting.filters import leaves
from runner.runs.json_files import RATES, Fields, JsonObject, finite
from runner.runs.record import RunRecord

# With more runs than these, a run is a row.
MOST_SIDE_BY_SIDE = 5
SECTIONS = ("recipe", "code", "data", "versions", "machine", "result")


def compare(runs: Sequence[RunRecord]) -> JsonObject:
    """Return what differs between runs.

    Returns:
        The directories of the ``runs``, the ``problems`` of each (what is damaged), and by section
        the dotted keys that differ, with a value for each run; None: it lacks the key.
    """
    found: JsonObject = {
        "runs": [str(run.path) for run in runs],
        "problems": [run.problems for run in runs],
    }
    facts = [_facts(run) for run in runs]
    for section in SECTIONS:
        names = dict.fromkeys(name for one in facts for name in one[section])
        rows = {name: [one[section].get(name) for one in facts] for name in names}
        found[section] = {k: row for k, row in rows.items() if any(one != row[0] for one in row)}
    if not all(run.has_recipe for run in runs):  # `problems` names what cannot be read
        found["recipe"] = {}
    return found


def _facts(run: RunRecord) -> dict[str, JsonObject]:
    """Return what is compared of a run, by section and dotted key."""
    known = describe_run.describe(run)
    result = {name: known[name] for name in ("objective", "metrics", "step", "seconds")}
    result |= {name: known["speed"].get(name) for name in RATES}
    facts = (run.recipe, known["code"], known["data"], known["packages"], known["machine"])
    sections = (*facts, {"status": run.status + run_table.damage(run), **result})
    return {
        name: {".".join(key): value for key, value in leaves(finite(section)) if key}
        for name, section in zip(SECTIONS, sections, strict=True)
    }


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
