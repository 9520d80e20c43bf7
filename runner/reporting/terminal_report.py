"""`runner report --terminal`: the same in text, curves as sparklines."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.recipe.format_counts import size
from runner.reporting import curves, swept_keys
from runner.reporting.compare_runs import short_names
from runner.reporting.findings import (
    SEEDS_NOTE,
    Findings,
    Spread,
    peak_memory,
    shown_objective,
    spread,
    throughput,
)
from runner.reporting.html_page import importance_note
from runner.reporting.run_table import cell, show_problems, status_text
from runner.run_dir.record import RunRecord
from runner.training.console import clock, number

MOST_ROWS, MOST_GROUPS = 30, 12
BAR = 30
NUMBERS = ("step", "time", "samples/s", "memory")


def show(title: str, found: Findings, console: Console) -> None:
    """Print a report."""
    console.print(Text(title, style="bold"))
    console.print(Text(found.summary, style="dim"))
    for metric in found.metrics:
        _curves(metric, found, console)
    if any(len(group.runs) > 1 for group in found.groups):
        _groups(found, console)
    _importance(found, console)
    _runs(found, console)


def _table(title: str, *heads: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for head in heads:
        right = head in (*("first", "last", "best", "runs", "seeds"), *NUMBERS)
        table.add_column(
            head, justify="right" if right else "left", overflow="fold", no_wrap=head == "curve"
        )
    return table


def _curves(metric: str, found: Findings, console: Console) -> None:
    table = _table(metric, "group", "seeds", "curve", "first", "last")
    bands = found.bands(metric, sys.maxsize)  # of each its first and last value
    for label, band in list(bands.items())[:MOST_GROUPS]:
        line = Text(curves.sparkline(band.mean), style="cyan")
        ends = [Text(number(float(band.mean[at]))) for at in (0, -1)]
        table.add_row(Text(label), band.seeds, line, *ends)
    if bands:
        console.print(table)
    if len(bands) > MOST_GROUPS:
        console.print(Text(f"{len(bands) - MOST_GROUPS} more groups are not shown.", style="dim"))


def _groups(found: Findings, console: Console) -> None:
    table = _table("groups of seeds", "group", "runs", "seeds", "objective")
    for group in found.groups[:MOST_ROWS]:
        measured = spread(group.runs)
        row = (Text(group.label), str(len(group.runs)), measured.seeds)
        table.add_row(*row, _mean_and_deviation(measured))
    console.print(table)
    console.print(Text(SEEDS_NOTE, style="dim"))


def _mean_and_deviation(measured: Spread) -> str:
    if measured.mean is None:
        return ""
    more = "" if measured.deviation is None else f" ± {number(measured.deviation)}"
    return f"{number(measured.mean)}{more}"


def _importance(found: Findings, console: Console) -> None:
    if found.importance.shares:
        table = _table("importance of keys", "key", "share", "")
        for key, share in found.importance.shares.items():
            bar = Text("█" * round(share * BAR), style="cyan")
            table.add_row(Text(key), f"{share:.0%}", bar)
        console.print(table)
    console.print(Text(importance_note(found), style="dim"))


def _runs(found: Findings, console: Console) -> None:
    heads = ["run", "status", *found.keys, "step", "objective", "time", "samples/s", "memory"]
    table = _table("runs, the best first", *heads)
    names = short_names(found.runs)
    for name, run in list(zip(names, found.runs, strict=True))[:MOST_ROWS]:
        table.add_row(*_cells(name, run, found))
    console.print(table)
    if len(names) > MOST_ROWS:
        console.print(Text(f"{len(names) - MOST_ROWS} more runs are not shown.", style="dim"))
    show_problems(found.runs, console)


def _cells(name: str, run: RunRecord, found: Findings) -> list[Text]:
    rate, memory = throughput(run), peak_memory(run)
    return [
        Text(name),
        status_text(run),
        *(Text(cell(swept_keys.value(run, key))) for key in found.keys),
        Text("" if run.step is None else str(run.step)),
        Text(shown_objective(run, found.judged_by)),
        Text("" if run.seconds is None else clock(run.seconds)),
        Text("" if rate is None else f"{rate:,.0f}"),
        Text("" if memory is None else size(memory)),
    ]
