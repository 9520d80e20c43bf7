"""Figures of a report by matplotlib, as SVG that takes the page's colours, and as PNG."""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.machine.errors import MissingPackageError
from runner.reporting import swept_keys
from runner.reporting.curves import Band
from runner.reporting.run_table import cell
from runner.runs.record import MISSING, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Text and axes are drawn in this colour, which the page replaces by its own (dark or light).
INK = "#010203"
# Okabe and Ito's colours, which people with any colour vision tell apart, on dark and light ground.
# Source: https://jfly.uni-koeln.de/color/
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B59F00", "#7F7F7F"),
)
_ROUNDED = re.compile(r"(\.\d\d)\d+")  # hundredths of a point
MOST_COLOURED = len(COLOURS)  # groups, the best; the others are drawn thin
NO_VALUE = "—"  # of a run that lacks a key
GAP = 0.2  # between the values of a key and the place of runs that lack it, as a share of the range
# Of a legend below axes that are 6.4 inches wide.
LEGEND_SIZE = 7.5  # of its font, in points
LINE_LENGTH, COLUMN_LENGTH = 88, 36  # characters of a line, alone or in one of two columns
MOST_LINES, MOST_OF_VALUE = 2, 32  # lines of an entry, and characters of a value in it
LOG_RATIO = 30.0  # between the largest and the smallest value, from which on an axis is logarithmic


@dataclass(frozen=True)
class Picture:
    """A figure: its name (of a file), its title, SVG for a page, and PNG for a document."""

    name: str
    title: str
    svg: str
    png: bytes


def require_matplotlib() -> None:
    """Raise a MissingPackageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("matplotlib", "runner report", "report") from error


@contextlib.contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "runner",  # ids are the same each time
        "path.simplify_threshold": 0.5,
        "font.size": 9.0,
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.15,
        "axes.axisbelow": True,
        "legend.frameon": False,
        **{
            key: INK
            for key in (
                *("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"),
                *("ytick.color", "grid.color"),
            )
        },
    }
    with matplotlib.rc_context(settings):
        yield


def _picture(
    name: str, title: str, draw: Callable[[Figure], object], size: tuple[float, float] = (6.4, 3.4)
) -> Picture:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(png, format="png", dpi=150, facecolor="white")
    return Picture(name, title, _for_page(svg.getvalue(), name, title), png.getvalue())


def _for_page(svg: str, name: str, title: str) -> str:
    """Return SVG to stand in a page: without a header, its ids its own, in the page's ink."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif[^\";]*", r"font: \1sans-serif", body)
    body = re.sub(r'\s(width|height)="[\d.]+pt"', "", body, count=2)
    body = re.sub(r' d="[^"]*"', lambda path: _ROUNDED.sub(r"\1", path[0]), body)
    body = body.replace(INK, "currentColor")
    return body.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def file_name(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.") or "figure"


# -- the figures ---------------------------------------------------------------------------


def learning_curves(metric: str, bands: Mapping[str, Band], *, lower_is_better: bool) -> Picture:
    """Draw a metric over steps: a line for each group, the best first, a band over its seeds.

    A loss that falls over orders of magnitude gets a logarithmic axis. A score keeps a linear one,
    on which the differences near its best value show.
    """
    best_bands = list(bands.items())[:MOST_COLOURED]
    entries = [_legend_entry(label, found) for label, found in best_bands]
    left_out = len(bands) - len(entries)
    entries += [f"… and {left_out} more"] if left_out else []
    lines = [line for entry in entries for line in entry.split("\n")]
    columns = 2 if max(map(len, lines)) <= COLUMN_LENGTH and len(lines) > 1 else 1

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="step", ylabel=metric.partition("/")[2])
        drawn = []
        for number, found in reversed(list(enumerate(bands.values()))):
            best = number < MOST_COLOURED
            colour = COLOURS[number] if best else INK
            marker = "o" if np.isfinite(found.mean).sum() < 3 else None
            line = {"color": colour, "linewidth": 1.5 if best else 0.7, "marker": marker}
            drawn += axes.plot(found.steps, found.mean, alpha=1.0 if best else 0.25, **line)
            if found.num_runs > 1 and best:
                axes.fill_between(
                    found.steps, found.low, found.high, color=colour, alpha=0.18, linewidth=0
                )
        if lower_is_better:
            _log_if_wide(axes, [v for found in bands.values() for v in found.mean])
        handles = drawn[::-1][: len(entries)]
        legend = figure.legend(
            handles, entries, fontsize=LEGEND_SIZE, loc="outside lower center", ncols=columns
        )
        share = legend.get_window_extent().width / figure.bbox.width
        if share > 0.97:  # wide letters
            for text in legend.get_texts():
                text.set_fontsize(LEGEND_SIZE * 0.92 / share)

    height = 3.4 + 0.15 * math.ceil(len(lines) / columns)
    return _picture(f"curve-{file_name(metric)}", metric, draw, (6.4, height))


def _legend_entry(label: str, found: Band) -> str:
    """Return the name of a group in at most `MOST_LINES` lines that fit below the axes."""
    more = f" ({found.num_runs} seeds)" if found.num_runs > 1 else ""
    if found.num_diverged:
        more = f" ({found.num_runs} seeds, {found.num_diverged} not finite)"
        more = more if found.num_runs > 1 else " (not finite)"
    words = " ".join(_shortened(word) for word in label.split())
    width = LINE_LENGTH - len(more)
    lines = textwrap.wrap(words, width, max_lines=MOST_LINES, placeholder=" …")
    return _plain("\n".join(lines) + more)


def _shortened(word: str) -> str:
    """Return ``key=value``, a long value without its middle."""
    key, sign, value = word.rpartition("=")
    if len(value) > MOST_OF_VALUE:
        half = MOST_OF_VALUE // 2
        value = f"{value[: half - 1]}…{value[-half:]}"
    return f"{key}{sign}{value}"


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds neither a formula nor a hidden label."""
    return text.replace("$", r"\$").lstrip("_")


def _log_if_wide(axes: Axes, values: Sequence[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO:
        axes.set_yscale("log")


def objective_by_key(key: str, runs: Sequence[RunRecord]) -> Picture:
    """Draw the objective of each run against the value of a swept key."""

    def draw(figure: Figure) -> None:
        first = next(run.objective for run in runs if run.objective is not None)
        axes = figure.add_subplot(xlabel=key, ylabel=first.metric)
        places = _Places([swept_keys.value(run, key) for run in runs])
        points = [
            (places.of(swept_keys.value(run, key)), run.objective.value)
            for run in runs
            if run.objective is not None
        ]
        axes.scatter(*zip(*points, strict=True), color=COLOURS[0], s=26, alpha=0.75, linewidths=0)
        means: dict[float, list[float]] = {}
        for place, value in points:
            if math.isfinite(value) and place != places.missing:
                means.setdefault(place, []).append(value)
        if len(means) > 1:
            at = sorted(means)
            axes.plot(at, [sum(means[x]) / len(means[x]) for x in at], color=COLOURS[3], alpha=0.7)
        places.label(axes)

    return _picture(f"objective-{file_name(key)}", f"objective against {key}", draw)


class _Places:
    """Where the values of a key lie on an axis: numbers at themselves, words one after another.

    Runs that lack the key are at `missing`, before the others; None: none of them does.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        self.words = sorted({cell(value) for value in values if value is not MISSING})
        self.numeric = 0 < len(numbers) == len([v for v in values if v is not MISSING])
        positive = self.numeric and bool(numbers) and min(numbers) > 0
        self.log = positive and max(numbers) / min(numbers) >= LOG_RATIO
        self.low = min(numbers, default=0.0)
        self.high = max(numbers, default=1.0)
        if not self.numeric:
            self.low, self.high = 0.0, max(0.0, len(self.words) - 1.0)
        self.missing = self._below() if any(value is MISSING for value in values) else None

    def _below(self) -> float:
        if not self.numeric:
            return -1.0
        if self.log:
            return float(self.low * (self.low / self.high) ** GAP)
        return float(self.low - (GAP * (self.high - self.low) or abs(self.low) or 1.0))

    def of(self, value: Any) -> float:
        """Return the place of a value."""
        if value is MISSING:
            assert self.missing is not None
            return self.missing
        return float(value) if self.numeric else float(self.words.index(cell(value)))

    def label(self, axes: Axes) -> None:
        """Name the words, and the place of runs without, on the horizontal axis; or scale it."""
        if self.log:
            axes.set_xscale("log")
        elif not self.numeric:
            shown = [word[:24] for word in self.words]
            turned = 30 if sum(map(len, shown)) > 40 else 0
            axes.set_xticks(range(len(shown)), map(_plain, shown), rotation=turned)
        if self.missing is None:
            return
        if self.numeric:
            ticks = axes.xaxis.get_major_locator().tick_values(self.low, self.high)
            inside = [float(tick) for tick in ticks if self.low <= tick <= self.high]
            inside = inside or [self.low]
            axes.set_xticks(inside, [f"{tick:g}" for tick in inside])
            axes.axvline(
                math.sqrt(self.missing * self.low) if self.log else (self.missing + self.low) / 2,
                color=INK,
                alpha=0.3,
                linestyle=":",
            )
        ticks, labels = list(axes.get_xticks()), [one.get_text() for one in axes.get_xticklabels()]
        axes.set_xticks([self.missing, *ticks], [NO_VALUE, *labels])
