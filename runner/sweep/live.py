"""A sweep while it runs: a table on a terminal, plain lines elsewhere.

Where a job's own output goes to the terminal (one job at a time), only a line before each job is
printed, and one where its process has died. Steps and losses are read from the end of each running
job's metrics.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from runner.exit_codes import DONE
from runner.recipe.schema import Recipe
from runner.runs.json_files import PLACE
from runner.runs.outcomes import describe_exit
from runner.runs.record import CUT_OFF, ENDED_WITH, RunRecord
from runner.sweep.sweep import job_dir
from runner.training.console import PipedConsole, clock, number

REFRESH_SECONDS = 1.0


@dataclass
class _Job:
    overrides: str
    total: int | None
    began: float
    monitor: str | None = None
    step: str = ""
    loss: str = ""
    objective: str = ""


class Live:
    """Shows the jobs of the sweep in `folder`, `total` of them (None: the sweeper decides).

    `done` were finished before this command. With `alone`, one job runs at a time and prints for
    itself. Overrides that all jobs have, `common`, are left out.
    """

    def __init__(
        self,
        folder: Path,
        total: int | None,
        done: int = 0,
        *,
        alone: bool = True,
        common: Collection[str] = (),
        console: Console | None = None,
    ) -> None:
        self._folder, self._total, self._done, self._alone = folder, total, done, alone
        self._console = console or PipedConsole(highlight=False)
        self._common = frozenset(common)
        self._jobs: dict[int, _Job] = {}
        self._next = 0.0
        self._failed = 0
        self._rich: RichLive | None = None
        if not alone and self._console.is_terminal:
            self._rich = RichLive(console=self._console, auto_refresh=False, transient=True)
            self._rich.start()

    def started(self, job: int, overrides: Sequence[str], recipe: Recipe) -> None:
        """Show that a job starts."""
        text = " ".join(one for one in overrides if one not in self._common)
        monitor = recipe.checkpoint.monitor
        self._jobs[job] = _Job(text, recipe.trainer.max_steps, time.monotonic(), monitor)
        if self._rich is None:
            of = "" if self._total is None else f" of {self._total}"
            self.note(f"job {job:04}{of} starts  {text}".rstrip())
        self._draw()

    def ended(self, job: int, code: int, exited: int) -> None:
        """Show how a job ended."""
        shown = self._jobs.pop(job)
        died = exited < 0 and code != DONE
        if self._alone and not died:
            return
        run = RunRecord(job_dir(self._folder, job))
        status = run.status if code == DONE else ENDED_WITH.get(code, CUT_OFF)
        seconds = time.monotonic() - shown.began
        self._done += code == DONE
        self._failed += code != DONE
        value = run.objective if code == DONE else None
        objective = "" if value is None else f"  objective {number(value.value)}"
        how = "" if not died else f" (its process {describe_exit(exited)})"
        log = "" if code == DONE or self._alone else f"  see {run.path / 'logs'}"
        text = f"job {job:04} {status}{how}  {clock(seconds)}{objective}{log}"
        self.note(f"{text}  {shown.overrides}".rstrip())
        self._draw()

    def elsewhere(self, job: int, holder: str) -> None:
        """Show that another command trains a job, which is waited for."""
        self.note(f"job {job:04} is waited for: another command trains it ({holder})")

    def note(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Draw the table again, if it is time."""
        if self._rich is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_SECONDS
            for job, shown in self._jobs.items():
                _read_position(RunRecord(job_dir(self._folder, job)), shown)
            self._draw()

    def close(self) -> None:
        """Stop drawing; printed lines stay."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    def _draw(self) -> None:
        if self._rich is not None:
            self._rich.update(self.table(), refresh=True)

    def table(self) -> Group:
        """Return the jobs that run, and how many there are of each kind."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("job", "step", "loss", "objective", "time"):
            table.add_column(name, justify="left" if name == "job" else "right", no_wrap=True)
        table.add_column("overrides", no_wrap=True, overflow="ellipsis")
        for job, one in sorted(self._jobs.items()):
            seconds = clock(time.monotonic() - one.began)
            cells = (f"{job:04}", one.step, one.loss, one.objective, seconds)
            table.add_row(*cells, Text(one.overrides))
        total = "" if self._total is None else f" of {self._total}"
        failed = f", {self._failed} failed" if self._failed else ""
        left = f"{self._done} finished{total}{failed}, {len(self._jobs)} running"
        return Group(table, Text(left, style="bold"))


def _read_position(run: RunRecord, job: _Job) -> None:
    """Fill in step, loss and metric from the last records of a run."""
    for line in reversed(run.tail()):
        try:
            record = json.loads(line)
            job.step = str(record["step"]) + (f"/{job.total}" if job.total else "")
            if record["split"] == "train":
                job.loss = number(record.get("loss", ""))
            elif record["split"] == "validation":
                name = job.monitor or next(key for key in record if key not in PLACE)
                job.objective = f"{name} {number(record[name])}"
        except (ValueError, KeyError, TypeError, StopIteration):  # it is being written
            continue
