"""The printed table, and a line as soon as a cell is done."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tests.zoo.cells import STRATEGIES
from tests.zoo.gates import Verdict
from tests.zoo.models import MODELS


def table(verdicts: Sequence[Verdict]) -> Table:
    """Return the table of all cells, those that did not run with their reason."""
    shown = Table(title="Models of transformers against a plain loop", title_justify="left")
    for name in ("model", "strategy", "precision"):
        shown.add_column(name)
    for name in ("loss", "gate", "weights", "gate"):
        shown.add_column(name, justify="right")
    for name in ("generate or logits", "save and load"):
        shown.add_column(name, overflow="fold")
    shown.add_column("s", justify="right")
    shown.add_column("verdict", overflow="fold")
    previous = None
    order = list(MODELS)
    for verdict in sorted(verdicts, key=lambda verdict: order.index(verdict.cell.model)):
        cell = verdict.cell
        if previous not in (None, cell.model):
            shown.add_section()
        previous = cell.model
        names = [MODELS[cell.model].label, STRATEGIES[cell.strategy].label]
        precision = {"no": "fp32"}.get(cell.precision, cell.precision)
        shown.add_row(*names, precision, *_numbers(verdict), *_rest(verdict))
    return shown


def _numbers(verdict: Verdict) -> list[str]:
    found, gate = verdict.difference, verdict.gate
    if found is None or gate is None:
        return [""] * 4
    return [f"{value:.1e}" for value in (found.loss, gate.loss, found.weight, gate.weight)]


def _rest(verdict: Verdict) -> list[str | Text]:
    if verdict.reason is not None:
        return ["", "", "", Text(f"not run: {verdict.reason}", style="yellow")]
    if verdict.difference is None:
        return ["", "", f"{verdict.seconds:.1f}", outcome(verdict)]
    tried = [verdict.answer or "ok", verdict.loaded or "ok"]
    return [*tried, f"{verdict.seconds:.1f}", outcome(verdict)]


def outcome(verdict: Verdict) -> Text:
    """Return "green", or everything that is wrong."""
    if verdict.green:
        return Text("green", style="green")
    wrong = [*verdict.failures, verdict.answer, verdict.loaded]
    return Text("RED: " + "; ".join(filter(None, wrong)), style="bold red")


def line(verdict: Verdict) -> str:
    """Return one line on a cell that is done."""
    if verdict.reason is not None:
        return f"{verdict.cell.name}: not run: {verdict.reason}"
    numbers = " ".join(_numbers(verdict))
    return f"{verdict.cell.name}: {outcome(verdict)} [{numbers}] ({verdict.seconds:.1f} s)"
