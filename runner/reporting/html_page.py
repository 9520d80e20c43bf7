"""`runner report`: one HTML page that needs nothing else: curves, groups of seeds, a table."""

from __future__ import annotations

import html
import math
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.reporting import curves, plots, swept_keys
from runner.reporting.compare_runs import short_names
from runner.reporting.curves import Band, Curve, Group
from runner.reporting.plots import Picture
from runner.reporting.run_table import (
    MOST_DAMAGES,
    cell,
    damage,
    in_order,
    judge_of,
    newest_first,
    relative,
)
from runner.runs import record as records
from runner.runs.json_files import number as as_number
from runner.runs.record import MISSING, RunRecord
from runner.training.console import clock, number

# Values of training that are no learning curve.
NO_CURVE = ("lr", "samples_per_second", "skipped_steps")
SEEDS_NOTE = (
    "Mean and standard deviation are over seeds: the newest finished run of each counts, any run "
    "where none of the group is finished."
)
MOST_METRICS, MOST_KEYS = 8, 12
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
figcaption { font-weight: 600; margin-bottom: .3rem }
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


@dataclass(frozen=True)
class Report:
    """Runs, read for a report.

    Attributes:
        runs: the best first; those without an objective last.
        keys: in which they differ, the seed apart, by `swept_keys`; at most `MOST_KEYS`.
        groups: of runs that are equal but for the seed.
        curves: by directory of a run, its curves by ``<split>/<metric>``.
        metrics: the names of the curves to show, the objective's first.
        judge: metric and mode of the objective that most runs have; None: none has any.
    """

    runs: list[RunRecord]
    keys: list[str]
    groups: list[Group]
    curves: dict[str, dict[str, Curve]]
    metrics: list[str]
    judge: tuple[str, str] | None

    @property
    def judged(self) -> list[RunRecord]:
        """The runs whose objective is of the one metric that is compared, the best first."""
        return [run for run in self.runs if _is_judged(run) and judge_of(run) == self.judge]

    @property
    def statuses(self) -> str:
        """How many runs there are, e.g. "12 runs: 10 finished, 2 failed"."""
        counts = Counter(run.status for run in self.runs)
        parts = [f"{counts[one]} {one}" for one in records.STATUSES if counts[one]]
        return f"{len(self.runs)} run{'' if len(self.runs) == 1 else 's'}: {', '.join(parts)}"

    def bands(self, metric: str) -> dict[str, Band]:
        """Return a metric's band by the label of each group that has measured it."""
        found = {}
        for group in self.groups:
            measured = [run for run in group.runs if metric in self.curves[str(run.path)]]
            chosen = curves.once_per_seed(measured)
            if present := [self.curves[str(run.path)][metric] for run in chosen]:
                found[group.label] = curves.band(present)
        return found

    def lower_is_better(self, metric: str) -> bool:
        """Return whether a metric improves as it falls: by the runs' mode, else by its name."""
        name = metric.partition("/")[2]
        modes = {name: mode for name, mode in [self.judge or ("", "")]}
        return modes.get(name, records.usual_mode(name)) == "min"


def _is_judged(run: RunRecord) -> bool:
    return run.objective is not None and math.isfinite(run.objective.value)


def read(runs: Sequence[RunRecord]) -> Report:
    """Read runs for a report."""
    ordered = in_order(newest_first(runs), "objective")
    judges = Counter(one for run in ordered if _is_judged(run) and (one := judge_of(run)))
    judge = judges.most_common(1)[0][0] if judges else None
    readable = [run for run in ordered if run.status != records.BROKEN]
    keys = swept_keys.find([run for run in readable if run.has_recipe])
    found = {str(run.path): curves.read_curves(run) for run in readable}
    names = curves.metric_names(found.values(), None if judge is None else judge[0])
    shown = [name for name in names if name.partition("/")[2] not in NO_CURVE][:MOST_METRICS]
    groups = curves.group_by_seed(readable, keys)
    return Report(ordered, keys[:MOST_KEYS], groups, found, shown, judge)


def throughput(run: RunRecord) -> float | None:
    """Return the samples per second of a run."""
    found = as_number(run.summary.get("samples_per_second"))
    return found if found is not None else as_number(run.last.get("samples_per_second"))


def peak_memory(run: RunRecord) -> float | None:
    """Return the most bytes that the main process held: on its accelerator, else in memory."""
    found = run.summary.get("memory") or {}
    on_device = as_number(found.get("device"))
    return on_device if on_device is not None else as_number(found.get("process"))


def pictures(found: Report) -> dict[str, list[Picture]]:
    """Return the figures of a report by its sections."""
    judged = found.judged
    sections: dict[str, list[Picture]] = {
        "Learning curves": [
            plots.learning_curves(metric, bands, lower_is_better=found.lower_is_better(metric))
            for metric in found.metrics
            if (bands := found.bands(metric)) and any(one.is_drawn for one in bands.values())
        ],
        "Objective": [
            plots.objective_by_key(key, judged) for key in swept_keys.vary(found.keys, judged)
        ],
    }
    return {title: figures for title, figures in sections.items() if figures}


def page(title: str, found: Report, figures: dict[str, list[Picture]]) -> str:
    """Return the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(found.statuses)} · {time.strftime("%Y-%m-%d %H:%M")}</p>',
        *_best(found),
        *_figures(figures),
        *_groups(found),
        "<h2>Runs</h2>",
        _runs(found),
        *_problems(found),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts)


def _best(found: Report) -> Iterable[str]:
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


def _figures(figures: dict[str, list[Picture]]) -> Iterable[str]:
    for title, drawn in figures.items():
        yield f'<h2>{_text(title)}</h2><div class="figures">'
        for one in drawn:
            yield f"<figure><figcaption>{_text(one.title)}</figcaption>{one.svg}</figure>"
        yield "</div>"
        if title == "Learning curves":
            yield (
                '<p class="quiet">A line is the mean over seeds, its band the range from the '
                "lowest to the highest; a gap is where one of them is NaN or infinite. Groups "
                f"beyond the best {plots.MOST_COLOURED} are thin.</p>"
            )


def _groups(found: Report) -> Iterable[str]:
    if not any(len(group.runs) > 1 for group in found.groups):
        return
    rows = []
    for group in found.groups:
        counted = curves.once_per_seed(group.runs)
        values = [run.objective.value for run in counted if run.objective and _is_judged(run)]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        shown = [group.label, len(group.runs), len(values), mean, deviation]
        rows.append([_cell(value) for value in shown])
    yield "<h2>Groups of seeds</h2>"
    yield _table(["group", "runs", "seeds with an objective", "mean", "standard deviation"], rows)
    yield f'<p class="quiet">{_text(SEEDS_NOTE)}</p>'


def _problems(found: Report) -> Iterable[str]:
    names = short_names(found.runs)
    damaged = [(n, one) for n, run in zip(names, found.runs, strict=True) for one in run.problems]
    for name, problem in damaged[:MOST_DAMAGES]:
        yield f'<p class="broken">{_text(name)}: {_text(problem)}</p>'
    if len(damaged) > MOST_DAMAGES:
        yield f"<p>{len(damaged) - MOST_DAMAGES} more damages; runner show names them.</p>"


def _runs(found: Report) -> str:
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


def _run_cells(name: str, run: RunRecord, keys: Sequence[str], found: Report) -> list[str]:
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
        _cell(objective, lambda value: _objective(run, value, found)),
        _cell(None if run.seconds is None else round(run.seconds, 1), clock),
        _cell(throughput(run), lambda value: f"{value:,.0f}"),
        _cell(None if memory is None else memory / 1e6, lambda value: f"{value:,.0f}"),
    ]


def _objective(run: RunRecord, value: float, found: Report) -> str:
    """Return an objective with its metric, where that is not the one that most runs have."""
    judge = judge_of(run)
    return number(value) if judge in (None, found.judge) else f"{judge[0]} {number(value)}"


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
