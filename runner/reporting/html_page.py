"""`runner report`: one HTML page that needs nothing else: figures, tables, light and dark."""

from __future__ import annotations

import html
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from typing import Any

from runner.recipe.format_counts import size
from runner.reporting import curves, plots, swept_keys
from runner.reporting.compare_runs import short_names
from runner.reporting.findings import (
    SEEDS_NOTE,
    Findings,
    peak_memory,
    shown_objective,
    spread,
    throughput,
)
from runner.reporting.importance import METHOD
from runner.reporting.plots import Picture
from runner.reporting.run_table import MOST_DAMAGES, cell, damage, relative
from runner.run_dir import record as records
from runner.run_dir.record import MISSING, RunRecord
from runner.training.console import clock, number

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #667; --line: #d8dce2;
  --ground: #fff; --panel: #f6f7f9; --accent: #0072B2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --quiet: #98a2b0; --line: #343a43;
  --ground: #14171b; --panel: #1c2026; --accent: #56B4E9; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { margin: .3rem 0 } .quiet { color: var(--quiet) } code { font-size: .9em;
  background: var(--panel); padding: .1em .35em; border-radius: 4px; overflow-wrap: anywhere }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)) }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem; min-width: 0 }
figure.wide { grid-column: 1 / -1 } figcaption { font-weight: 600; margin-bottom: .3rem }
figure svg { width: 100%; height: auto; display: block; max-height: 26rem }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px }
table { border-collapse: collapse; width: 100%; font-size: .88rem }
th, td { padding: .35rem .65rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap } td.long { white-space: normal; overflow-wrap: anywhere; min-width: 14rem }
tr:last-child td { border-bottom: 0 } th { background: var(--panel) }
th button { all: unset; cursor: pointer; font-weight: 600 }
th button:focus-visible { outline: 2px solid var(--accent) }
th button::after { content: " ↕"; color: var(--quiet); font-size: .8em }
th[aria-sort=ascending] button::after { content: " ↑"; color: var(--accent) }
th[aria-sort=descending] button::after { content: " ↓"; color: var(--accent) }
td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.best td { background: color-mix(in srgb, var(--accent) 14%, transparent) }
.finished { color: #1a8f4c } .failed, .broken { color: #d33 } .running { color: var(--accent) }
.stopped, .interrupted { color: #b7791f } .pruned { color: var(--quiet) }
"""
SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, row = head.parentElement;
  const body = head.closest("table").tBodies[0], at = [...row.children].indexOf(head);
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of row.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = line => line.children[at].dataset.value ?? line.children[at].textContent;
  const rows = [...body.rows].sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return up ? order : -order;
  });
  body.append(...rows);
};
"""
MOST_BARS = 16


def pictures(found: Findings) -> dict[str, list[Picture]]:
    """Return the figures of a report by its sections."""
    judged = found.judged
    sections: dict[str, list[Picture]] = {
        "Learning curves": [
            plots.learning_curves(metric, bands)
            for metric in found.metrics
            if (bands := found.bands(metric)) and any(one.is_drawn for one in bands.values())
        ],
        "Objective": [],
        "Timing and memory": _cost(found),
    }
    if keys := swept_keys.vary(found.keys, judged):
        sections["Objective"] = [plots.objective_by_key(key, judged) for key in keys]
        sections["Objective"].append(plots.parallel_coordinates(keys, judged))
    if found.importance.shares:
        title = "importance of keys"
        share = plots.bars("importance", title, found.importance.shares, "share of the importance")
        sections["Objective"].append(share)
    return {title: figures for title, figures in sections.items() if figures}


def _cost(found: Findings) -> list[Picture]:
    shown = found.runs[:MOST_BARS]
    names = short_names(shown)
    figures = []
    for name, title, read, unit in (
        ("samples-per-second", "samples per second", throughput, "samples/s"),
        ("memory", "peak memory of the main process", peak_memory, "MB"),
    ):
        values = {
            label: value / 1e6 if unit == "MB" else value
            for label, run in zip(names, shown, strict=True)
            if (value := read(run)) is not None
        }
        if values:
            best = f", the best {len(shown)} runs" if len(shown) < len(found.runs) else ""
            figures.append(plots.bars(name, title + best, values, unit))
    return figures


def page(title: str, found: Findings, figures: dict[str, list[Picture]]) -> str:
    """Return the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(found.summary)} · {time.strftime("%Y-%m-%d %H:%M")}</p>',
        *_best(found),
        *_figures(figures, found),
        *_groups(found),
        "<h2>Runs</h2>",
        _runs(found),
        *_problems(found),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts)


def _best(found: Findings) -> Iterable[str]:
    if not found.judged:
        yield "<p>No run has measured an objective.</p>"
        return
    best = found.judged[0]
    assert best.objective is not None
    value = f"{best.objective.metric} {number(best.objective.value)}"
    settings = curves.settings(best, found.keys)
    yield f"<p>Best: <strong>{_text(value)}</strong> {_text(settings)}</p>"
    command = f"runner again {shlex.quote(relative(best.path))}"
    yield f'<p class="quiet">Again: <code>{_text(command)}</code></p>'


def _figures(figures: dict[str, list[Picture]], found: Findings) -> Iterable[str]:
    for title, drawn in figures.items():
        yield f'<h2>{_text(title)}</h2><div class="figures">'
        for one in drawn:
            wide = ' class="wide"' if one.name == "parallel-coordinates" else ""
            yield f"<figure{wide}><figcaption>{_text(one.title)}</figcaption>{one.svg}</figure>"
        yield "</div>"
        if title == "Learning curves":
            yield (
                '<p class="quiet">A line is the mean over runs whose recipe, code and data are '
                "equal but for the seed (of several runs of a seed, the newest), its band the "
                "range from the lowest to the highest; a gap is where one of them is NaN or "
                f"infinite. Groups beyond the best {plots.MOST_COLOURED} are thin.</p>"
            )
        if title == "Objective":
            yield f'<p class="quiet">{_text(importance_note(found))}</p>'
    if "Objective" not in figures:
        yield f'<p class="quiet">{_text(importance_note(found))}</p>'


def importance_note(found: Findings) -> str:
    """Return how importance was measured, or why it was not, and which keys are left out."""
    measured = found.importance
    text = f"No importance of keys: {measured.reason}."
    if not measured.reason:
        text = f"Importance: {METHOD}. R² on unseen runs is {measured.fit:.2f}"
        text += "." if measured.fit > 0.2 else ": too low to tell much."
    left = found.num_keys - len(found.keys)
    return f"{text} {left} more keys differ and are not shown." if left > 0 else text


def _groups(found: Findings) -> Iterable[str]:
    if not any(len(group.runs) > 1 for group in found.groups):
        return
    rows = []
    for group in found.groups:
        one = spread(group.runs)
        values = [group.label, len(group.runs), one.seeds, one.mean, one.deviation]
        rows.append([_cell(value) for value in values])
    yield "<h2>Groups of seeds</h2>"
    yield _table(["group", "runs", "seeds", "mean objective", "standard deviation"], rows)
    yield f'<p class="quiet">{_text(SEEDS_NOTE)}</p>'


def _problems(found: Findings) -> Iterable[str]:
    names = short_names(found.runs)
    damaged = [(n, one) for n, run in zip(names, found.runs, strict=True) for one in run.problems]
    for name, problem in damaged[:MOST_DAMAGES]:
        yield f'<p class="broken">{_text(name)}: {_text(problem)}</p>'
    if len(damaged) > MOST_DAMAGES:
        yield f"<p>{len(damaged) - MOST_DAMAGES} more damages; runner show names them.</p>"


def _runs(found: Findings) -> str:
    seeds = {cell(run.value("seed")) for run in found.runs}
    shown = [*found.keys, *(["seed"] if len(seeds) > 1 else [])]
    heads = ["run", "status", *shown, "step", "objective", "time (s)", "samples/s", "memory (MB)"]
    names = short_names(found.runs)
    rows, marks = [], []
    best = found.judged[0] if len(found.judged) > 1 else None
    for name, run in zip(names, found.runs, strict=True):
        rows.append(_run_cells(name, run, shown, found))
        marks.append("best" if run is best else "")
    return _table(heads, rows, marks)


def _run_cells(name: str, run: RunRecord, keys: Sequence[str], found: Findings) -> list[str]:
    memory = peak_memory(run)
    reason = run.reason if run.status in (records.FAILED, records.BROKEN) else ""
    mark = f'<span class="broken">{damage(run)}</span>' if damage(run) else ""
    status = f'<td class="{run.status}" title="{_text(run.reason)}">{_text(run.status)}{mark}</td>'
    objective = None if run.objective is None else run.objective.value
    return [
        f'<td title="{_text(str(run.path))}">{_text(name)}'
        + (f'<br><span class="quiet">{_text(reason)}</span></td>' if reason else "</td>"),
        status,
        *(_cell(swept_keys.value(run, key)) for key in keys),
        _cell(run.step),
        _cell(objective, lambda _: shown_objective(run, found.judged_by)),
        _cell(None if run.seconds is None else round(run.seconds, 1), clock),
        _cell(throughput(run), lambda value: f"{value:,.0f}"),
        _cell(None if memory is None else memory / 1e6, lambda value: f"{value:,.0f}"),
    ]


def _cell(value: Any, form: Any = None) -> str:
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is MISSING or value is None or is_nan:
        text = "" if value is MISSING or form is None else "–"
        text = form(value) if is_nan and form else text
        return f'<td class="number" data-value="">{_text(text)}</td>'
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = form(value) if form else cell(value) if isinstance(value, int) else number(value)
        if form is None and isinstance(value, float) and 0 < abs(value) < 1e-3:
            text = f"{value:g}"
        return f'<td class="number" data-value="{value!r}">{_text(text)}</td>'
    long = ' class="long"' if len(cell(value)) > 40 else ""
    return f"<td{long}>{_text(cell(value))}</td>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    head = "".join(f'<th scope="col"><button>{_text(name)}</button></th>' for name in heads)
    lines = []
    for at, row in enumerate(rows):
        mark = f' class="{marks[at]}"' if marks and marks[at] else ""
        lines.append(f"<tr{mark}>{''.join(row)}</tr>")
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def file_size(page_text: str) -> str:
    """Return how large a page is, as "812.0 kB"."""
    return size(len(page_text.encode("utf-8", errors="replace")))
