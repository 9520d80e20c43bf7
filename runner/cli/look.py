"""Command lines of ``runner list``, ``show``, ``compare`` and ``report``. Free of torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.recipe import paths
from runner.runs import record
from runner.runs.record import RunRecord

MOST_ROWS = 50
PAGE = "report.html"


def list_runs(arguments: Sequence[str]) -> int:
    """Print the runs below folders, newest first.

    Raises:
        ConfigError: if a folder is not there, or a filter names no key.
    """
    from runner.reporting import filters, run_table

    parser = CommandParser("list", "List runs, newest first.")
    add = parser.add_argument
    words = "folders (default: runs), and filters: status=failed name=digits tag=x since=2d "
    words += "optimizer.lr=0.01 'objective>0.9'; several hold together, a,b is either"
    add("words", metavar="DIR|FILTER", nargs="*", help=words)
    add("--sort", metavar="KEY", help="e.g. objective (the best first), step")
    add("--reverse", action="store_true", help="the other way round")
    add("--limit", type=int, metavar="N", help="rows; 0: all (default: 50; all with --json)")
    add("--columns", metavar="KEY,KEY", default="", help="keys of the recipe")
    add("--json", action="store_true", help="as JSON")
    found = parser.parse_intermixed_args(list(arguments))
    columns = [name for name in found.columns.split(",") if name]
    folders, conditions = _divided(found.words)
    parsed = filters.parse(conditions)
    runs = _found(folders)
    chosen = filters.apply(parsed, runs)
    filters.require_keys(columns, runs)
    ordered = run_table.newest_first(chosen)
    if found.sort:
        ordered = run_table.in_order(ordered, found.sort)
    ordered = ordered[::-1] if found.reverse else ordered
    limit = found.limit if found.limit is not None else 0 if found.json else MOST_ROWS
    shown = ordered[:limit] if limit > 0 else ordered
    if found.json:
        print(run_table.as_json([run_table.described(run) for run in shown]))
        return DONE
    if shown:
        run_table.show(shown, columns, run_table.console_for_tables())
    more = "; --limit 0 shows all" if len(shown) < len(chosen) else ""
    where = ", ".join(folders or [record.DEFAULT_FOLDER])
    print(f"{len(shown)} of {len(runs)} runs in {where}{more}")
    return DONE


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders and the filters among words; a folder may have a sign in its name."""
    folders = [word for word in words if os.path.isdir(word) or not set("=<>") & set(word)]
    return folders, [word for word in words if word not in folders]


def _found(folders: Sequence[str]) -> list[RunRecord]:
    if not folders and not Path(record.DEFAULT_FOLDER).is_dir():
        return []
    return record.find_runs(folders or [record.DEFAULT_FOLDER])


def show_run(arguments: Sequence[str]) -> int:
    """Print what runs are: recipe, code, versions, metrics, checkpoints, and why they ended.

    Raises:
        ConfigError: if a folder is not there, or holds no run.
    """
    from runner.reporting import describe_run, run_table

    found = _parsed("show", "Describe runs.", arguments)
    runs = record.require_runs(found.folders)
    described = [describe_run.describe(run) for run in runs]
    if found.json:
        print(run_table.as_json(described[0] if len(described) == 1 else described))
        return DONE
    console = run_table.console_for_tables()
    for content in described:
        describe_run.show(content, console)
    return DONE


def _parsed(command: str, description: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(command, description)
    parser.add_argument("folders", metavar="RUN_DIR", nargs="+", help="runs, or a sweep's jobs")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser.parse_args(list(arguments))


def compare_runs(arguments: Sequence[str]) -> int:
    """Print what differs between runs, side by side.

    Raises:
        ConfigError: if a folder is not there, or there are fewer than two runs.
    """
    from runner.reporting import compare_runs as comparing
    from runner.reporting import run_table

    found = _parsed("compare", "Show what differs between runs.", arguments)
    runs = record.require_runs(found.folders)
    if len(runs) < 2:
        rule, remedy = "two runs or more are compared", "Name another run, too."
        raise ConfigError.of(" ".join(found.folders), rule, remedy)
    compared = comparing.compare(runs)
    if found.json:
        print(run_table.as_json(compared))
    else:
        comparing.show(compared, run_table.console_for_tables())
    return DONE


def report_runs(arguments: Sequence[str]) -> int:
    """Write a page about runs.

    Raises:
        ConfigError: if a folder has no run, or the page cannot be written.
        MissingPackageError: if the page is to be drawn and matplotlib is not installed.
    """
    from runner.reporting import filters, html_page, run_table

    parser = CommandParser("report", "Write a page about runs.")
    what = "runs, sweeps, folders of runs; and filters, as for runner list"
    parser.add_argument("words", metavar="DIR|FILTER", nargs="+", help=what)
    page = f"the page, in HTML (default: {PAGE} in the only DIR)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=page)
    found = parser.parse_intermixed_args(list(arguments))
    folders, conditions = _divided(found.words)
    parsed = filters.parse(conditions)
    if not folders:
        rule = "a report is of runs, sweeps or folders of them"
        raise ConfigError.of("no DIR", rule, "Name one: runner report runs/digits.")
    html_page.require_matplotlib()
    output = found.output or Path(folders[0] if len(folders) == 1 else ".", PAGE)
    output = Path(os.path.abspath(os.path.expanduser(output)))
    if output.suffix.lower() not in (".html", ".htm") or not output.parent.is_dir():
        rule = "a report is a page in HTML (.html or .htm) in a folder that exists"
        raise ConfigError.of(f"--output {output}", rule, f"Give --output {PAGE}.")
    runs = filters.apply(parsed, record.require_runs(folders))
    if not runs:
        rule, words = "no run fulfills these conditions", " ".join(found.words)
        raise ConfigError.of(words, rule, "Leave one out; runner list shows the runs.")
    read = html_page.read(runs)
    title = ", ".join(run_table.relative(Path(os.path.abspath(f))) for f in folders)
    text = html_page.page(title, read)
    try:
        checkpoints.write_atomically(output, text.encode("utf-8", errors="replace"))
    except OSError as error:
        rule = f"the report is written there, and that failed ({paths.failure(error)})"
        raise ConfigError.of(str(output), rule, "Give --output FILE elsewhere.") from error
    print(f"{run_table.relative(output)}: {read.statuses}")
    return DONE
