"""Command line of ``runner report``. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.recipe import paths
from runner.runs import discovery

PAGE = "report.html"
SUFFIXES = (".html", ".htm")


def main(arguments: Sequence[str]) -> int:
    """Write a page about runs.

    Raises:
        ConfigError: if a folder has no run, or the page cannot be written.
        MissingPackageError: if the page is to be drawn and matplotlib is not installed.
    """
    parser = CommandParser(
        prog="runner report", description="Write a page about runs.", allow_abbrev=False
    )
    what = "runs, sweeps, folders of runs; and filters, as for runner list"
    parser.add_argument("words", metavar="DIR|FILTER", nargs="+", help=what)
    page = f"the page, in HTML: .html is added to a name without (default: {PAGE} in the only DIR)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=page)
    found = parser.parse_intermixed_args(list(arguments))
    return _report(found.words, found.output)


def _report(words: Sequence[str], output: Path | None) -> int:
    from runner.reporting import filters, html_page, run_table

    folders = [word for word in words if os.path.isdir(word) or not set("=<>") & set(word)]
    conditions = filters.parse([word for word in words if word not in folders])
    if not folders:
        rule = "a report is of runs, sweeps or folders of them"
        raise ConfigError.of("no DIR", rule, "Name one: runner report runs/digits.")
    html_page.require_matplotlib()
    output = _writable(output or _default(folders))
    runs = filters.apply(conditions, discovery.require_runs(folders))
    if not runs:
        rule = "no run fulfills these conditions"
        raise ConfigError.of(" ".join(words), rule, "Leave one out; runner list shows the runs.")
    found = html_page.read(runs)
    title = ", ".join(run_table.relative(Path(os.path.abspath(f))) for f in folders)
    text = html_page.page(title, found)
    try:
        checkpoints.write_atomically(output, text.encode("utf-8", errors="replace"))
    except OSError as error:
        rule = f"the report is written there, and that failed ({paths.failure(error)})"
        raise ConfigError.of(str(output), rule, "Give --output FILE elsewhere.") from error
    print(f"{run_table.relative(output)}: {found.statuses}")
    return DONE


def _default(folders: Sequence[str]) -> Path:
    return Path(folders[0], PAGE) if len(folders) == 1 else Path(PAGE)


def _writable(output: Path) -> Path:
    output = Path(os.path.abspath(os.path.expanduser(output)))
    if not output.suffix and not _is_other(output):
        output = output.with_name(f"{output.name}{SUFFIXES[0]}")
    if not output.parent.is_dir() or _is_other(output):
        rule = "a report is a file in a folder that exists"
        raise ConfigError.of(f"--output {output}", rule, f"Give --output {PAGE}.")
    if output.suffix.lower() not in SUFFIXES:
        rule = f"a report is a page in HTML ({' or '.join(SUFFIXES)})"
        raise ConfigError.of(
            f"--output {output}", rule, f"Give --output {output.with_suffix(SUFFIXES[0])}."
        )
    return output


def _is_other(path: Path) -> bool:
    """Return whether something is there that is no file: a folder, a device."""
    return path.exists() and not path.is_file()
