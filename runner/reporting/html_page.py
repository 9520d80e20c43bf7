"""`runner report`: one HTML page that loads nothing: learning curves, groups of seeds, a table.

matplotlib draws the figures; rich writes the tables, that of the runs as `runner list` prints it.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from accel.machine import imports
from runner.recipe import hydra_setup, serialization
from runner.reporting import run_table
from runner.reporting.filters import leaves
from runner.reporting.run_table import cell
from runner.runs import record as records
from runner.runs.json_files import HISTOGRAM, MEDIA, OF_RUN, PLACE, TIME_SHARE, finite, number
from runner.runs.record import CODE, MISSING, RunRecord
from runner.training import console

SEED = "seed"
# Nodes of a recipe that do not change what a run computes, beside those that `resume=` ignores.
NO_CAUSE = ((SEED,), ("resume",), ("run_dir",), *serialization.ELSEWHERE)
FACTORY = ("name", "_target_")
NO_CURVE = (*PLACE, *OF_RUN)
MOST_METRICS, MOST_KEYS = 8, 12
MOST_COLOURED = 10  # groups, the best; the others are grey
MOST_LETTERS = 80  # of a group's name below the axes
STYLE = """
body { margin: 0 auto; max-width: 80rem; padding: 1.5rem; font-family: system-ui, sans-serif }
img { width: min(100%, 38rem) }
pre { overflow-x: auto }
"""
Curve = tuple[list[float], list[float]]  # steps and values


@dataclass(frozen=True)
class Report:
    """Runs, read for a report.

    Attributes:
        runs: the best first; those without an objective last.
        keys: dotted keys that tell the groups apart; at most `MOST_KEYS`.
        groups: by label, runs whose recipes and code are equal but for the seed.
        curves: by ``<split>/<metric>`` and label, the curve of each run; validation first.
    """

    runs: list[RunRecord]
    keys: list[str]
    groups: dict[str, list[RunRecord]]
    curves: dict[str, dict[str, list[Curve]]]

    @property
    def statuses(self) -> str:
        """How many runs there are, e.g. "12 runs: 10 finished, 2 failed"."""
        counts = Counter(run.status for run in self.runs)
        parts = [f"{counts[one]} {one}" for one in records.STATUSES if counts[one]]
        return f"{len(self.runs)} run{'' if len(self.runs) == 1 else 's'}: {', '.join(parts)}"


def read(runs: Sequence[RunRecord]) -> Report:
    """Read runs for a report; what cannot be read is said below the table of the runs."""
    ordered = run_table.in_order(runs, "objective")
    readable = [run for run in ordered if run.has_recipe]
    differing = differing_keys(readable)
    keys = _telling(differing, readable)[:MOST_KEYS]
    groups = group_by_seed(readable, differing, keys)
    curves: dict[str, dict[str, list[Curve]]] = {}
    for label, members in groups.items():
        for run in members:
            for name, curve in read_curves(run).items():
                curves.setdefault(name, {}).setdefault(label, []).append(curve)
    names = sorted(curves, key=lambda name: not name.startswith("validation/"))[:MOST_METRICS]
    return Report(ordered, keys, groups, {name: curves[name] for name in names})


def read_curves(run: RunRecord) -> dict[str, Curve]:
    """Return the curves of a run by ``<split>/<metric>``; lines that are damaged are left out."""
    found: dict[str, Curve] = {}
    for record in run.records():
        split, step = record.get("split"), number(record.get("step"))
        for name, value in record.items():
            read = number(value)
            if step is None or read is None or split == "test":
                continue
            if name in NO_CURVE or name.startswith((TIME_SHARE, "lr_")):
                continue
            steps, values = found.setdefault(f"{split}/{name}", ([], []))
            steps.append(step)
            values.append(read)
    return found


# -- groups --------------------------------------------------------------------------------


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the dotted keys in which the recipes of runs differ, and `CODE` if their code does.

    The seed, names, and where a run is computed do not count.
    """
    names = dict.fromkeys(key for run in runs for key, _ in leaves(run.recipe))
    found = [
        ".".join(key)
        for key in names
        if not any(key[: len(one)] == one for one in NO_CAUSE)
        and len({_text(run.value(".".join(key))) for run in runs}) > 1
    ]
    return found + [CODE] * (len({run.code for run in runs}) > 1)


def _telling(keys: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys without those that differ only because the factories of their nodes do."""
    given = {hydra_setup.key_of(str(one)) for run in runs for one in run.job.get("overrides") or ()}
    factories = [key.rpartition(".")[0] for key in keys if key.rpartition(".")[2] in FACTORY]
    return [
        key
        for key in keys
        if key in given
        or key.rpartition(".")[2] in FACTORY
        or not any(key.startswith(f"{node}.") for node in factories)
    ]


def group_by_seed(
    runs: Sequence[RunRecord], differing: Sequence[str], keys: Sequence[str]
) -> dict[str, list[RunRecord]]:
    """Return runs that are equal but for the seed, by the values of `keys`, in the runs' order."""
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        found.setdefault(tuple(_text(run.value(key)) for key in differing), []).append(run)
    groups: dict[str, list[RunRecord]] = {}
    for members in found.values():
        label = settings(members[0], keys) or members[0].name
        # Values may be equal in the digits shown.
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def once_per_seed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the newest finished run of each seed; where none is finished, the newest.

    A run of the same seed again is no further sample of what the seed changes.
    """
    counted = [run for run in runs if run.status == records.FINISHED] or runs
    oldest_first = run_table.newest_first(counted)[::-1]
    return list({_text(run.value(SEED)): run for run in oldest_first}.values())


def settings(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the values of a run, as "optimizer.name=sgd optimizer.lr=0.1", but those it lacks."""
    values = {key: run.value(key) for key in keys}
    return " ".join(f"{key}={cell(one)}" for key, one in values.items() if one is not MISSING)


def _text(value: Any) -> str:
    """Return a value as a text, equal for equal values."""
    return "" if value is MISSING else json.dumps(finite(value), sort_keys=True, default=str)


# -- the page ------------------------------------------------------------------------------


def page(title: str, found: Report) -> str:
    """Return the page."""
    figures = {name: learning_curves(name, groups) for name, groups in found.curves.items()}
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<p>{found.statuses} · {time.strftime('%Y-%m-%d %H:%M')}</p>",
            *(f"<p>{html.escape(line)}</p>" for line in _best(found)),
            *(f'<img alt="{html.escape(name)}" src="{one}">' for name, one in figures.items()),
            _tables(found),
            *(line for run in found.runs[:MOST_COLOURED] for line in _time(run)),
            *(_media(found.runs[0]) if found.runs else ()),
            "</body></html>",
        ]
    )


def _best(found: Report) -> Iterator[str]:
    best = found.runs[0]
    if best.objective is None:
        yield "No run has measured an objective."
        return
    value = f"{best.objective.metric} {console.number(best.objective.value)}"
    yield f"Best: {value}  {settings(best, found.keys)}"
    yield f"Again: runner again {shlex.quote(run_table.relative(best.path))}"


def _time(run: RunRecord) -> Iterator[str]:
    """Yield HTML of how fast a run was and where its time went: by phase, and over its steps."""
    from matplotlib.figure import Figure

    if speed := run.summary.get("speed"):
        yield f"<h2>time of {html.escape(run_table.relative(run.path))}</h2>"
        yield f"<p>{console.shown_rates(speed)}: {console.shown_shares(speed['seconds'])}</p>"
    records = [one for one in run.records() if f"{TIME_SHARE}other" in one]
    names = dict.fromkeys(name for one in records for name in one if name.startswith(TIME_SHARE))
    if len(records) > 1:
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="share of the time", ylim=(0, 1))
        shares = [[one.get(name, 0.0) for one in records] for name in names]
        axes.stackplot([one["step"] for one in records], shares, labels=list(names))
        figure.legend(fontsize=7.5, loc="outside right")
        yield f'<img alt="shares of the time" src="{_drawn(figure)}">'


def _media(run: RunRecord) -> Iterator[str]:
    """Yield HTML of the newest text, pictures and tables that a run has logged, by name."""
    folders = sorted((run.path / MEDIA).glob("*"), key=lambda folder: int(folder.name))
    newest = {file.name: file for folder in folders for file in sorted(folder.iterdir())}
    for file in newest.values():
        name, content = html.escape(file.stem), file.read_bytes()
        yield f"<h2>{name} · step {file.parent.name} of {html.escape(run.name)}</h2>"
        rows = list(csv.reader(content.decode().splitlines())) if file.suffix == ".csv" else []
        if file.suffix == ".png" or tuple(rows[:1]) == (list(HISTOGRAM),):
            address = histogram(rows[1:]) if rows else _address(content)
            yield f'<img alt="{name}" src="{address}">'
        else:
            text = "\n".join("  ".join(row) for row in rows) or content.decode()
            yield f"<pre>{html.escape(text)}</pre>"


def _tables(found: Report) -> str:
    """Return HTML of what rich prints: the groups of seeds, and the table of `runner list`."""
    to_page = run_table.console_for_tables(file=io.StringIO(), record=True)
    if any(len(runs) > 1 for runs in found.groups.values()):
        to_page.print("Groups of seeds: the newest finished run of each seed counts")
        to_page.print(_groups(found))
    run_table.show(found.runs, [*found.keys, SEED], to_page)
    return to_page.export_html(code_format="<pre>{code}</pre>", inline_styles=True)


def _groups(found: Report) -> Table:
    table = run_table.table("group", "runs", "seeds", "mean", "standard deviation")
    judge = run_table.judge_of(found.runs[0])
    for label, runs in found.groups.items():
        counted = [run for run in once_per_seed(runs) if run_table.judge_of(run) == judge]
        values = [run.objective.value for run in counted if run.objective is not None]
        values = [value for value in values if math.isfinite(value)]
        mean = console.number(statistics.fmean(values)) if values else ""
        deviation = console.number(statistics.stdev(values)) if len(values) > 1 else ""
        table.add_row(label, str(len(runs)), str(len(values)), mean, deviation)
    return table


def require_matplotlib() -> None:
    """Raise a MissingPackageError if matplotlib is not installed."""
    imports.require("matplotlib", "runner report", extra="report")


def learning_curves(metric: str, groups: Mapping[str, Sequence[Curve]]) -> str:
    """Draw a line for each run, in the colour of its group, and return a ``data:`` address."""
    import matplotlib.style
    from matplotlib.figure import Figure

    # Labels are no formulas.
    with matplotlib.style.context(["tableau-colorblind10", {"text.parse_math": False}]):
        figure = Figure(figsize=(6.4, 5.0), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=metric)
        for number_, (label, curves) in enumerate(groups.items()):
            best = number_ < MOST_COLOURED
            colour, order = (f"C{number_}", 3) if best else ("lightgrey", 2)
            for steps, values in curves:
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, values, color=colour, linewidth=1.0, marker=marker, zorder=order)
            if best:
                # matplotlib hides labels that begin with an underscore.
                axes.plot([], color=colour, label=label[:MOST_LETTERS].lstrip("_"))
        figure.legend(fontsize=7.5, loc="outside lower center")
        return _drawn(figure)


def histogram(rows: Sequence[Sequence[str]]) -> str:
    """Draw a bar for each (from, to, count), and return a ``data:`` address."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    starts, ends, counts = zip(*(map(float, row) for row in rows), strict=True)
    figure.add_subplot(ylabel="count").stairs(counts, [*starts, ends[-1]], fill=True)
    return _drawn(figure)


def _drawn(figure: Any) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return _address(png.getvalue())


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
