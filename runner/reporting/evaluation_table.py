"""`runner eval` of several runs: a table, a run a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.reporting.run_table import relative
from runner.run_dir.json_files import Fields
from runner.training.console import number


def show(rows: Sequence[tuple[Path, Fields | str]], console: Console) -> None:
    """Print evaluations; below them why a run could not be measured, and what to know of others.

    Args:
        rows: (run directory, its evaluation as `Evaluation` has it, or the reason).
        console: where to.
    """
    measured = [found for _, found in rows if not isinstance(found, str)]
    names = list(
        dict.fromkeys(
            (split, name)
            for found in measured
            for split, metrics in found["metrics"].items()
            for name in metrics
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("step", justify="right")
    for split, name in names:
        table.add_column(f"{split} {name}", justify="right", no_wrap=True)
    if any(isinstance(found, str) or found["notes"] for _, found in rows):
        table.add_column("", no_wrap=True)
    for run_dir, found in rows:
        table.add_row(*_cells(run_dir, found, names))
    console.print(table)
    for run_dir, found in rows:
        if isinstance(found, str):
            console.print(Text(f"{relative(run_dir)}: failed: {found}", style="red"))
        else:
            for note in found["notes"]:
                console.print(Text(f"{relative(run_dir)}: {note}", style="yellow"))


def _cells(run_dir: Path, found: Fields | str, names: Sequence[tuple[str, str]]) -> list[Text]:
    if isinstance(found, str):
        empty = [Text("")] * (1 + len(names))
        return [Text(relative(run_dir)), *empty, Text("failed", style="red")]
    step = found["step"]
    cells = [Text(relative(run_dir)), Text("" if step is None else str(step))]
    for split, name in names:
        value = found["metrics"].get(split, {}).get(name)
        cells.append(Text("" if value is None else number(value)))
    return [*cells, Text("see below", style="yellow")] if found["notes"] else cells
