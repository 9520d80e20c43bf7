"""Runs cells on warm workers, and turns whatever happens into verdicts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests import helpers
from tests.helpers import WorkerError, run_distributed
from tests.parity.running import cause
from tests.zoo import workers
from tests.zoo.cells import Cell, reason_not_to_run
from tests.zoo.gates import Verdict, judge
from tests.zoo.models import MODELS

SECONDS = 300.0
REFUSING = ("zero1", "zero2", "zero3")


def run(cell: Cell) -> Verdict:
    """Return the verdict on `cell`, which a failure on any process turns red."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = replace(cell, folder=folder)
        try:
            answers = run_distributed(workers.train, cell.world_size, own, timeout=SECONDS)
        except WorkerError as error:
            if is_refusal(cell, str(error)):
                return Verdict(cell, f"refused by name: {cause(str(error))}")
            return Verdict(cell, failures=[cause(str(error))], seconds=time.monotonic() - start)
    return judge(cell, answers, time.monotonic() - start)


def is_refusal(cell: Cell, error: str) -> bool:
    """Return whether DeepSpeed's strategy has refused layers that are unfrozen after `prepare`.

    Its engines lay out what they train when they are built, and would never move such layers.
    """
    refused = "ConfigError" in error and "requires_grad" in error
    return MODELS[cell.model].unfreezes and cell.strategy in REFUSING and refused


def run_all(cells: Iterable[Cell]) -> Iterator[Verdict]:
    """Yield a verdict for each of `cells` as it is known; workers of one world size live a time."""
    size = 0
    for cell in sorted(cells, key=lambda cell: cell.world_size):
        reason = reason_not_to_run(cell)
        if reason is not None:
            yield Verdict(cell, reason)
            continue
        if cell.world_size != size:
            helpers.close_pools()
            size = cell.world_size
        yield run(cell)
    helpers.close_pools()


def line(verdict: Verdict) -> str:
    """Return one line on a cell: its differences beside their gates, and what is wrong."""
    told = [verdict.cell.name]
    if verdict.reason is not None:
        return f"{verdict.cell.name}: not run: {verdict.reason}"
    if (found := verdict.difference) is not None and (gate := verdict.gate) is not None:
        told.append(f"loss {found.loss:.1e} of {gate.loss:.1e},")
        told.append(f"weights {found.weight:.1e} of {gate.weight:.1e},")
    wrong = "; ".join(filter(None, [*verdict.failures, verdict.answer, verdict.loaded]))
    outcome = "green" if verdict.green else f"RED: {wrong}"
    return f"{' '.join(told)} {verdict.seconds:.1f} s: {outcome}"
