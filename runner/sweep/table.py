"""The end of a sweep: `results.csv`, a table, the best job's command, failed jobs. Free of torch.

All of it comes from `sweep.json` and the journal: two files, however many jobs there are.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from accel.checkpoint import directory as checkpoints
from runner.exit_codes import DONE, FAILED
from runner.recipe import hydra_setup, paths
from runner.runs import environment, json_files, sessions
from runner.runs.sweep_records import FINISHED, PRUNED
from runner.sweep import task
from runner.sweep.directory import Sweep
from runner.sweep.journal import FAILED as FAILURE
from runner.sweep.journal import INTERRUPT, PENDING, STOP, JobState, Objective
from runner.sweep.settings import is_setting
from runner.training.console import UNLIMITED_COLUMNS, PipedConsole, clock, number

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)", re.ASCII)
_LIST = re.compile(r"\[[\w\s.+,-]+\]", re.ASCII)  # of plain values
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=e))(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
FILE = "results.csv"
MOST_ROWS = 40
STYLES = {"finished": "green", "failed": "red", "stopped": "yellow", "interrupted": "yellow"}
_GOOD = (FINISHED, PRUNED, STOP, INTERRUPT)
COLUMNS = ("status", "objective", "best_step", "step", "seconds", "attempts", "run_dir")


@dataclass(frozen=True)
class Row:
    """One job of a sweep; `values` are its overrides by key."""

    job: int
    values: Mapping[str, str]
    overrides: tuple[str, ...]
    state: JobState
    run_dir: str

    def field(self, name: str) -> object:
        """Return a value that the journal has of the job's end; "" without one."""
        value = self.state.ended.get(name)
        return "" if value is None else value

    @property
    def is_no_number(self) -> bool:
        """Whether the job has an objective, or one of several, that is NaN or infinite."""
        found = self.state.objective
        values = found if isinstance(found, list) else [] if found is None else [found]
        return not all(map(math.isfinite, values))


@dataclass(frozen=True)
class Results:
    """The rows of a sweep, best first, and the keys that differ between them.

    Where jobs are judged by different metrics, `metric` and `mode` are empty: values of different
    metrics have no order, so that rows are sorted by number and none is best.
    """

    rows: list[Row]
    swept: list[str]
    metric: str
    mode: str
    folder: str
    metrics: tuple[str, ...] = ()
    """The metrics with their modes, where jobs are judged by several."""

    @property
    def best(self) -> Row | None:
        """The finished job with the best objective; None: no single objective was measured."""
        if self.metrics:
            return None
        scored = (row for row in self.rows if _rank(row.state.objective, self.mode)[0] == 0)
        return next((row for row in scored if row.state.status == FINISHED), None)


def results(sweep: Sweep, states: Mapping[int, JobState]) -> Results:
    """Return the results of a sweep, whose journal has these states."""
    overrides = {job.number: job.overrides for job in sweep.description.jobs}
    for job, state in states.items():
        overrides.setdefault(job, tuple(state.overrides))
    rows = [
        Row(job, _values(given), given, states.get(job, JobState()), f"{job:04}")
        for job, given in sorted(overrides.items())
    ]
    judged = dict.fromkeys(one for row in rows if (one := _judged_by(row)))
    if len(judged) > 1:
        names = tuple(f"{metric} ({mode})" for metric, mode in judged)
        return Results(rows, _swept(rows), "", "", str(sweep.path), names)
    metric, mode = next(iter(judged), ("", "min"))
    rows.sort(key=lambda row: (_rank(row.state.objective, mode), row.job))
    return Results(rows, _swept(rows), metric, mode, str(sweep.path))


def _judged_by(row: Row) -> tuple[str, str] | None:
    """Return the metric of a job's objective and its mode; None: it has none."""
    metric = str(row.field("metric"))
    return (metric, str(row.field("mode") or "min")) if metric else None


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return dict(found for override in overrides if (found := _value(override)) is not None)


@functools.lru_cache(maxsize=4096)  # most jobs have most overrides in common
def _value(override: str) -> tuple[str, str] | None:
    key = hydra_setup.key_of(override)
    if key.startswith("hydra") or is_setting(override):
        return None
    return key, "null" if override.startswith("~") else plain_value(override.partition("=")[2])


def plain_value(text: str) -> str:
    """Return an override's value in one form: numbers, true and false, and lists of them.

    A grid has been through Hydra, which writes 0.001 and True; a list of jobs is as it was typed.
    """
    if _LIST.fullmatch(text):
        return f"[{','.join(plain_value(one.strip()) for one in text[1:-1].split(','))}]"
    if text.lower() in ("true", "false"):
        return text.lower()
    if _INTEGER.fullmatch(text):
        return str(int(text))
    return str(float(text)) if _FLOAT.fullmatch(text) else text


def _swept(rows: Sequence[Row]) -> list[str]:
    """Return the keys that have not one value in all jobs."""
    keys = dict.fromkeys(key for row in rows for key in row.values)
    return [key for key in keys if len({row.values.get(key) for row in rows}) > 1]


def _rank(objective: Objective, mode: str) -> tuple[int, float]:
    if not isinstance(objective, float):
        return (1 if isinstance(objective, list) else 3), 0.0
    if not math.isfinite(objective):
        return 2, 0.0
    return 0, -objective if mode == "max" else objective


def write_csv(sweep: Sweep, found: Results) -> None:
    """Write the rows of a sweep, by number, to its `results.csv`, unless they stand there.

    Raises:
        OSError: if it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *found.swept, *COLUMNS])
    for row in sorted(found.rows, key=lambda row: row.job):
        state = row.state
        objective = state.objective
        shown = " ".join(map(repr, objective)) if isinstance(objective, list) else objective
        values = [row.values.get(key, "") for key in found.swept]
        numbers = [row.field(name) for name in ("best_step", "step", "seconds")]
        end = [state.status, "" if shown is None else shown, *numbers, state.attempts, row.run_dir]
        writer.writerow([row.job, *values, *end])
    path, content = sweep.path / FILE, text.getvalue().encode(errors="replace")
    if not path.is_file() or path.read_bytes() != content:
        checkpoints.write_atomically(path, content)


@dataclass(frozen=True)
class _Layout:
    """What a table of results has: the less room there is, the less."""

    breaks_headings: bool = True
    has_step: bool = True
    has_keys: bool = True
    padding: int = 1

    def heading(self, text: str) -> Text:
        """Return a column's heading, broken at dots and spaces on a narrow console."""
        return Text(re.sub(r"(?<=[.]\b)| ", "\n", text) if self.breaks_headings else text)


LAYOUTS = (
    _Layout(breaks_headings=False),
    _Layout(),
    _Layout(has_step=False),
    _Layout(has_keys=False),
    _Layout(has_step=False, has_keys=False, padding=0),
)


def _fitting(found: Results, console: Console) -> _Layout:
    """Return the fullest layout in which every cell is whole on a console."""
    wide = console.options.update(max_width=UNLIMITED_COLUMNS)
    for layout in LAYOUTS:
        if Measurement.get(console, wide, _table(found, layout)).maximum <= console.width:
            break
    return layout


def _table(found: Results, layout: _Layout) -> Table:
    """Return the best rows as a table: the swept keys, objective, step, time."""
    name = found.metric or "objective"
    title = f"{name} ({found.mode})" if found.metric else name
    result = Table(
        box=box.SIMPLE,
        title=found.folder,
        title_justify="left",
        title_style="dim",
        padding=(0, layout.padding),
    )
    result.add_column("job", no_wrap=True)
    keys = found.swept if layout.has_keys else []
    for key in keys:
        result.add_column(layout.heading(key), overflow="fold")
    result.add_column("status", no_wrap=True)
    for column in (title, *(["best step"] if layout.has_step else []), "time"):
        result.add_column(layout.heading(column), justify="right", no_wrap=True)
    for row in found.rows[:MOST_ROWS]:
        value = row.state.objective
        measured = [value] if isinstance(value, float) else value or []
        unit = f"{row.field('metric')} " if found.metrics and measured else ""
        seconds = row.field("seconds")
        result.add_row(
            f"{row.job:04}",
            *(Text(row.values.get(key, "")) for key in keys),
            Text(row.state.status, style=STYLES.get(row.state.status, "")),
            Text(unit + "  ".join(map(number, measured))),
            *([str(row.field("best_step"))] if layout.has_step else []),
            clock(float(seconds)) if isinstance(seconds, (int, float)) else "",
        )
    return result


def show(found: Results, command: str, console: Console) -> None:
    """Print the table, and the command that trains the best job alone.

    Where the swept keys have no room as columns, they are listed below, a job a line.
    """
    layout = _fitting(found, console)
    console.print(_table(found, layout))
    for row in found.rows[:MOST_ROWS] if found.swept and not layout.has_keys else []:
        values = " ".join(f"{k}={row.values[k]}" for k in found.swept if k in row.values)
        console.print(f"{row.job:04}  {values}", markup=False, highlight=False, soft_wrap=True)
    left = len(found.rows) - MOST_ROWS
    if left > 0:
        console.print(f"and {left} more in {found.folder}/{FILE}", markup=False, soft_wrap=True)
    if found.metrics:
        shown = ", ".join(found.metrics)
        console.print(
            f"No job is best: they are judged by different metrics, {shown}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if found.best is not None:
        console.print(f"best: job {found.best.job:04}", markup=False, highlight=False)
        console.print(
            f"  {command_of(found.best, command)}", markup=False, highlight=False, soft_wrap=True
        )


def command_of(row: Row, config_name: str) -> str:
    """Return the command line that trains a job's recipe alone."""
    flags = [] if config_name == hydra_setup.PRIMARY else ["--config-name", config_name]
    kept = [one for one in row.overrides if not _is_of_launchers(one)]
    return shlex.join(["python", "-m", "runner", *flags, *kept])


def _is_of_launchers(override: str) -> bool:
    key = hydra_setup.key_of(override).replace("/", ".")
    return key.startswith(("hydra.launcher", "hydra.sweeper")) or is_setting(override)


# -- the end of a command ------------------------------------------------------------------


def nothing_left(sweep: Sweep, config_name: str, states: Mapping[int, JobState]) -> int:
    """Show a sweep in which nothing is left to do, and return the exit code."""
    found = results(sweep, states)
    code = _written(sweep, found)
    show(found, config_name, PipedConsole(highlight=False))
    code = max(code, _without_a_number(found))
    print(f"{sweep.path} is finished. Nothing is left to do; sweep.dir=DIR begins a new one.")
    return code


def _written(sweep: Sweep, found: Results) -> int:
    """Write `results.csv`; return the code that says whether it was possible.

    A failure is told, and hides neither the table nor which jobs have failed.
    """
    try:
        write_csv(sweep, found)
    except OSError as error:
        told = f"Warning: {FILE} is not written: {paths.failure(error)} ({sweep.path})"
        print(f"{told}. The same command again writes it.", file=sys.stderr, flush=True)
        return FAILED
    return DONE


def conclude(
    config_name: str,
    sweep: Sweep,
    numbers: Sequence[int],
    before: Mapping[int, JobState],
    *,
    is_search: bool = False,
) -> int | None:
    """Write and show the results; print which jobs failed, and return the code of the sweep.

    It is that of a failure as soon as one job has failed, however other jobs have ended.
    None: no job was to be run, and all has been written. `numbers` are the jobs that were to be
    run, `before` the states before the command. Of a search all failed jobs count: it does not try
    those again whose objective is no number.
    """
    begun = [n for n, state in sweep.journal.states().items() if _is_new(state, before.get(n))]
    task.record_deaths(sweep.path, begun)
    states = sweep.journal.states()
    found = results(sweep, states)
    others = [n for n, state in states.items() if is_search and state.status == FAILURE]
    mine = sorted({*numbers, *begun, *others})
    written = _written(sweep, found)
    show(found, config_name, PipedConsole(highlight=False))
    written = max(written, _without_a_number(found))
    _tell_other_code(found)
    ended = {number: states.get(number, JobState()) for number in mine}
    bad = {number: state for number, state in ended.items() if state.status not in _GOOD}
    unstarted = [number for number, state in bad.items() if state.status == PENDING]
    failed = [number for number in bad if number not in unstarted]
    for some, what in ((failed, "failed"), (unstarted, "were not started")):
        if some:
            names = ", ".join(f"{number:04}" for number in some)
            print(f"{len(some)} of {len(found.rows)} jobs {what}: {names}", file=sys.stderr)
    if bad or written != DONE:
        return FAILED
    return max(map(_code_of, ended.values()), default=None)


def _without_a_number(found: Results) -> int:
    """Say which finished jobs have an objective that is NaN or infinite, and return the code."""
    rows = [row.job for row in found.rows if row.state.status == FINISHED and row.is_no_number]
    if not rows:
        return DONE
    names = ", ".join(f"{job:04}" for job in sorted(rows))
    told = "their objectives are no finite numbers, and the same command does not train them again"
    print(f"{len(rows)} of {len(found.rows)} jobs finished, but {told}: {names}", file=sys.stderr)
    return FAILED


def _tell_other_code(found: Results) -> None:
    """Say which jobs were trained with other code than the first: files were edited meanwhile."""
    codes: dict[str, list[int]] = {}
    for row in sorted(found.rows, key=lambda row: row.job):
        if row.state.is_complete and (trained := sessions.begun(Path(found.folder, row.run_dir))):
            codes.setdefault(_code_of_sessions(trained), []).append(row.job)
    for other in list(codes.values())[1:]:
        first, names = next(iter(codes.values()))[0], ", ".join(f"{job:04}" for job in other)
        told = f"trained with other Python code than job {first:04}, which has changed meanwhile"
        print(f"{len(other)} of {len(found.rows)} jobs were {told}: {names}", file=sys.stderr)


def _code_of_sessions(folders: Sequence[Path]) -> str:
    """Return the digests of the user's packages in sessions, each once."""
    found = [json_files.read_json(one / environment.FILE).get("code") for one in folders]
    return json_files.digest([one for n, one in enumerate(found) if one not in found[:n]])


def _is_new(state: JobState, before: JobState | None) -> bool:
    return before is None or state.attempt != before.attempt or state.status != before.status


def _code_of(state: JobState) -> int:
    if state.is_complete:
        return DONE
    code = state.ended.get("code")
    return code if isinstance(code, int) and code != DONE else FAILED
