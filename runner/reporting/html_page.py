"""`runner report`: one HTML page that needs nothing else: curves, groups of seeds, a table.

Figures are made by matplotlib, as SVG that takes the page's colours.
"""

from __future__ import annotations

import html
import io
import math
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.machine.errors import MissingPackageError
from runner.reporting import curves
from runner.reporting.compare_runs import short_names
from runner.reporting.curves import Band, Curve, Group
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
from runner.runs.record import MISSING, RunRecord
from runner.training.console import clock, number

# Values of training that are no learning curve.
NO_CURVE = ("lr", "samples_per_second", "skipped_steps")
SEEDS_NOTE = (
    "Mean and standard deviation are over seeds: the newest finished run of each counts, any run "
    "where none of the group is finished."
)
MOST_METRICS, MOST_KEYS = 8, 12
# Text and axes are drawn in this colour, which the page replaces by its own (dark or light).
INK = "#010203"
# Okabe and Ito's colours, which people with any colour vision tell apart, on dark and light ground.
# Source: https://jfly.uni-koeln.de/color/
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B59F00", "#7F7F7F"),
)
MOST_COLOURED = len(COLOURS)  # groups, the best; the others are drawn thin
MOST_LETTERS = 80  # of a group's name below the axes
LOG_RATIO = 30.0  # between the largest and the smallest value, from which on an axis is logarithmic
SETTINGS: dict[str, Any] = {  # of matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "runner",  # ids are the same each time
    "path.simplify_threshold": 0.5,
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "axes.axisbelow": True,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
_ROUNDED = re.compile(r"(\.\d\d)\d+")  # hundredths of a point
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
td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.best td { background: color-mix(in srgb, var(--accent) 14%, transparent) }
.finished { color: #1a8f4c } .failed, .broken { color: #d33 } .running { color: var(--accent) }
.stopped, .interrupted { color: #b7791f } .pruned { color: var(--quiet) }
"""


@dataclass(frozen=True)
class Report:
    """Runs, read for a report.

    Attributes:
        runs: the best first; those without an objective last.
        keys: in which they differ, the seed apart, by `curves`; at most `MOST_KEYS`.
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


def _is_judged(run: RunRecord) -> bool:
    return run.objective is not None and math.isfinite(run.objective.value)


def read(runs: Sequence[RunRecord]) -> Report:
    """Read runs for a report."""
    ordered = in_order(newest_first(runs), "objective")
    judges = Counter(one for run in ordered if _is_judged(run) and (one := judge_of(run)))
    judge = judges.most_common(1)[0][0] if judges else None
    readable = [run for run in ordered if run.status != records.BROKEN]
    keys = curves.differing_keys([run for run in readable if run.has_recipe])
    found = {str(run.path): curves.read_curves(run) for run in readable}
    names = curves.metric_names(found.values(), None if judge is None else judge[0])
    shown = [name for name in names if name.partition("/")[2] not in NO_CURVE][:MOST_METRICS]
    groups = curves.group_by_seed(readable, keys)
    return Report(ordered, keys[:MOST_KEYS], groups, found, shown, judge)


def page(title: str, found: Report) -> str:
    """Return the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(found.statuses)} · {time.strftime("%Y-%m-%d %H:%M")}</p>',
        *_best(found),
        *_figures(found),
        *_groups(found),
        "<h2>Runs</h2>",
        _runs(found),
        *_problems(found),
        "</body></html>",
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


def _figures(found: Report) -> Iterable[str]:
    bands = {metric: found.bands(metric) for metric in found.metrics}
    drawn = {k: one for k, one in bands.items() if any(band.is_drawn for band in one.values())}
    if not drawn:
        return
    yield '<h2>Learning curves</h2><div class="figures">'
    for metric, one in drawn.items():
        figure = learning_curves(metric, one)
        yield f"<figure><figcaption>{_text(metric)}</figcaption>{figure}</figure>"
    yield (
        '</div><p class="quiet">A line is the mean over seeds, its band the range from the lowest '
        "to the highest; a gap is where one of them is NaN or infinite. Groups beyond the best "
        f"{MOST_COLOURED} are thin.</p>"
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
    heads = ["run", "status", *shown, "step", "objective", "time"]
    names = short_names(found.runs)
    rows, marks = [], []
    best = found.judged[0] if len(found.judged) > 1 else None
    for name, run in zip(names, found.runs, strict=True):
        rows.append(_run_cells(name, run, shown, found))
        marks.append("best" if run is best else "")
    return _table(heads, rows, marks)


def _run_cells(name: str, run: RunRecord, keys: Sequence[str], found: Report) -> list[str]:
    reason = run.reason if run.status in (records.FAILED, records.BROKEN) else ""
    mark = f'<span class="broken">{damage(run)}</span>' if damage(run) else ""
    status = f'<td class="{run.status}" title="{_text(run.reason)}">{_text(run.status)}{mark}</td>'
    objective: Any = None if run.objective is None else run.objective.value
    if run.objective is not None and judge_of(run) != found.judge:  # not that of most runs
        objective = f"{run.objective.metric} {number(objective)}"
    return [
        f'<td title="{_text(str(run.path))}">{_text(name)}'
        + (f'<br><span class="quiet">{_text(reason)}</span></td>' if reason else "</td>"),
        status,
        *(_cell(run.value(key)) for key in keys),
        _cell(run.step),
        _cell(objective),
        _cell(None if run.seconds is None else clock(run.seconds)),
    ]


def _cell(value: Any) -> str:
    if value is MISSING or value is None:
        return "<td></td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = number(value) if isinstance(value, float) else cell(value)
        return f'<td class="number">{_text(text)}</td>'
    long = ' class="long"' if len(cell(value)) > 40 else ""
    return f"<td{long}>{_text(cell(value))}</td>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in heads)
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


# -- figures -------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raise a MissingPackageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("matplotlib", "runner report", "report") from error


def learning_curves(metric: str, bands: Mapping[str, Band]) -> str:
    """Draw a metric over steps: a line for each group, the best first, a band over its seeds.

    A loss that falls over orders of magnitude gets a logarithmic axis. A score keeps a linear one,
    on which the differences near its best value show.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        height = 3.4 + 0.15 * min(len(bands), MOST_COLOURED + 1)
        figure = Figure(figsize=(6.4, height), layout="constrained")
        name = metric.partition("/")[2]
        axes = figure.add_subplot(xlabel="step", ylabel=name)
        for number, (label, band) in enumerate(bands.items()):
            best = number < MOST_COLOURED
            colour = COLOURS[number] if best else INK
            axes.plot(
                band.steps,
                band.mean,
                color=colour,
                linewidth=1.5 if best else 0.7,
                alpha=1.0 if best else 0.25,
                marker="o" if np.isfinite(band.mean).sum() < 3 else None,
                label=_legend_entry(label, band) if best else None,
                zorder=3 if best else 2,
            )
            if band.num_runs > 1 and best:
                axes.fill_between(
                    band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0
                )
        values = [v for band in bands.values() for v in band.mean if math.isfinite(v)]
        falls = records.usual_mode(name) == "min" and min(values) > 0
        if falls and max(values) / min(values) > LOG_RATIO:
            axes.set_yscale("log")
        figure.legend(fontsize=7.5, loc="outside lower center")
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(svg.getvalue(), metric)


def _for_page(svg: str, name: str) -> str:
    """Return SVG to stand in a page: without a header, its ids its own, in the page's ink."""
    own = re.sub(r"[^A-Za-z0-9_.]+", "-", name)
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{own}-", body)
    body = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif[^\";]*", r"font: \1sans-serif", body)
    body = re.sub(r'\s(width|height)="[\d.]+pt"', "", body, count=2)
    body = re.sub(r' d="[^"]*"', lambda path: _ROUNDED.sub(r"\1", path[0]), body)
    body = body.replace(INK, "currentColor")
    return body.replace("<svg", f'<svg role="img" aria-label="{_text(name)}"', 1)


def _legend_entry(label: str, band: Band) -> str:
    """Return the name of a group in one line; matplotlib finds no formula or hidden label in it."""
    notes = [f"{band.num_runs} seeds"] if band.num_runs > 1 else []
    notes += [f"{band.num_diverged} not finite"] if band.num_diverged else []
    text = label if len(label) <= MOST_LETTERS else f"{label[:MOST_LETTERS]} …"
    text = f"{text} ({', '.join(notes)})" if notes else text
    return text.replace("$", r"\$").lstrip("_")
