"""Console output of a run: header, progress, evaluations, a table at the end. Rank 0 only.

On a terminal the progress is one line that is redrawn; elsewhere it is plain lines, so that a
log file stays readable. Nothing is drawn by a thread: the loop's own calls draw, at most some times
a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from runner.training import run_log

Rows = Sequence[tuple[str, str]]

UNLIMITED_COLUMNS = 10_000  # where nobody's terminal limits a line
DATA_SHARE = 0.1  # of the time
ONE_LINE = Column(no_wrap=True, overflow="ellipsis")


class PipedConsole(Console):
    """A console that lets the command know that nobody reads it any more (`| head`)."""

    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process on its own."""
        self.quiet = True
        raise BrokenPipeError


class Display:
    """Shows one run; `enabled` on rank 0.

    The console is standard output by default. At least `refresh_seconds` lie between two drawings
    of the progress line; without a terminal each log point is a line.
    """

    def __init__(
        self, enabled: bool = True, console: Console | None = None, refresh_seconds: float = 0.2
    ) -> None:
        self.console = console or PipedConsole(highlight=False, soft_wrap=False)
        self.console.quiet = not enabled
        self.live = enabled and self.console.is_terminal
        self._every = refresh_seconds
        self._next = 0.0
        self._progress: Progress | None = None
        self._values: dict[str, float] = {}
        self._total: int | None = None
        self._epochs: int | None = None
        self._started_at = 0.0
        self._deadline: float | None = None
        self._first_step = self._step = self._epoch = 0

    # -- before ----------------------------------------------------------------------------

    def header(self, title: str, rows: Rows) -> None:
        """Show a table: a title and labelled lines."""
        self._print(Text(title, style="bold"))
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            self._print(f"  {label:<{width}}  {value}")

    def start(
        self, step: int, total: int | None, epochs: int | None, deadline: float | None = None
    ) -> None:
        """Begin to show progress after `step` optimizer steps of `total`, if known.

        `deadline` is the value of `time.monotonic` at which the run is to stop, if any.
        """
        self._total, self._epochs = total, epochs
        self._first_step = self._step = step
        self._started_at = time.monotonic()
        self._deadline = deadline
        self._next = 0.0
        if self.live:
            self._progress = Progress(
                TextColumn("{task.fields[steps]}", style="bold"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[status]}", markup=False, table_column=ONE_LINE),
                console=self.console,
                auto_refresh=False,
                transient=True,
            )
            self._progress.add_task("train", total=total, steps=self._steps(), status="")
            self._progress.start()

    # -- during ----------------------------------------------------------------------------

    def step(self, step: int, epoch: int) -> None:
        """Show that an optimizer step was made. Cheap: draws only when it is time."""
        self._step, self._epoch = step, epoch
        if self.live and time.monotonic() >= self._next:
            self._draw()

    def values(self, values: Mapping[str, float]) -> None:
        """Show the values of a log point: loss, lr, rates; each is shown until the next."""
        self._values = dict(values)
        line = f"{self._steps()}  {self.status()}"
        if not self.live:
            self._print(line)
            return
        run_log.note(line)
        if time.monotonic() >= self._next:
            self._draw()

    def evaluating(self, split: str, batch: int, num_batches: int | None) -> None:
        """Show how far an evaluation is."""
        if self._progress is None or time.monotonic() < self._next:
            return
        self._draw(f"{split}: batch {_count(batch, num_batches)}")

    def evaluation(
        self, split: str, step: int, epoch: int, metrics: Mapping[str, float], mark: str = ""
    ) -> None:
        """Show the metrics of an evaluation, with a remark such as "best"."""
        listed = "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
        width = len(str(self._total or ""))
        place = f"step {step:>{width}}  epoch {self._epoch_of(epoch)}"
        line = Text(f"{split:<10}  {place}  {listed}")
        if mark:
            line.append(f"  {mark}", style="bold green")
        self._print(line)

    def note(self, text: str) -> None:
        """Show a line of its own."""
        self._print(text)

    def text(self, title: str, body: str) -> None:
        """Show a longer text under a title, as it is."""
        self._print(f"{title}:\n{body}")

    def status(self) -> str:
        """Return epoch, loss, remaining time, throughput and learning rate as one line.

        The share of waiting for data is shown from `DATA_SHARE` on, and a rank that is slower in
        its own time than the median rank. A narrow terminal cuts off its end.
        """
        values, remaining = self._values, self._remaining()
        parts = [f"epoch {self._epoch_of(self._epoch)}"]
        if "loss" in values:
            parts.append(f"loss {number(values['loss'])}")
        if remaining is not None:
            parts.append(f"ETA {clock(remaining)}")
        if "samples_per_second" in values:
            parts.append(shown_rates(values))
        if values.get("time/data", 0.0) >= DATA_SHARE:
            parts.append(f"data {values['time/data']:.0%}")
        if "slowest_rank" in values:
            parts.append("rank {slowest_rank:.0f} takes {slowest_rank_ratio:.1f}×".format(**values))
        if "lr" in values:
            parts.append(f"lr {values['lr']:.1e}")
        return "  ".join(parts)

    # -- after -----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop showing progress; printed lines stay."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def final(self, title: str, rows: Rows) -> None:
        """Show the final table of the run."""
        self.close()
        self.header(title, rows)

    # -- parts -----------------------------------------------------------------------------

    def _draw(self, status: str | None = None) -> None:
        self._next = time.monotonic() + self._every
        if self._progress is not None:
            task, steps = self._progress.task_ids[0], self._steps()
            status = status or self.status()
            self._progress.update(
                task, completed=self._step, refresh=True, steps=steps, status=status
            )

    def _epoch_of(self, epoch: int) -> str:
        # Behind the last epoch there is none.
        return _count(epoch if self._epochs is None else min(epoch, self._epochs), self._epochs)

    def _steps(self) -> str:
        return f"step {_count(self._step, self._total)}"

    def _remaining(self) -> float | None:
        now, done = time.monotonic(), self._step - self._first_step
        limits = [] if self._deadline is None else [max(0.0, self._deadline - now)]
        if self._total is not None and done > 0:
            limits.append((now - self._started_at) / done * max(0, self._total - self._step))
        return min(limits, default=None)

    def _print(self, line: str | Text) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=not self.live)


def _count(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done:>{len(str(total))}}/{total}"


def number(value: object) -> str:
    """Return a metric with four decimals or as a power of ten, and a count as an integer."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value.is_integer() and (value == 0 or abs(value) >= 10):
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def short(value: float) -> str:
    """Return a rate in at most four characters and a unit letter: 87.3, 1.2k, 35M."""
    if not math.isfinite(value):
        return str(value)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.1f}{unit}" if abs(value) < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}"


def shown_rates(values: Mapping[str, float]) -> str:
    """Return tokens per second, or else samples, and the MFU where it is known."""
    name = "tokens" if values.get("tokens_per_second") else "samples"
    rate = f"{short(values[f'{name}_per_second'])} {name}/s"
    return f"{rate}  MFU {values['mfu']:.0%}" if "mfu" in values else rate


def shown_shares(seconds: Mapping[str, float]) -> str:
    """Return how time is divided among phases, e.g. "data 3%, forward_backward 80%"."""
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{phase} {spent / total:.0%}" for phase, spent in seconds.items())


def clock(seconds: float) -> str:
    """Return a duration as M:SS, or H:MM:SS from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
