"""Runs cells on warm workers, and turns whatever happens into verdicts."""

from __future__ import annotations

import re
import time

from tests.helpers import WorkerError, run_distributed
from tests.parity import workers
from tests.parity.cells import Cell
from tests.parity.gates import Verdict, judge

SECONDS = 300.0


def run(cell: Cell) -> Verdict:
    """Return the verdict on `cell`, which a failure on any process turns red."""
    start = time.monotonic()
    try:
        answers = run_distributed(workers.train, cell.world_size, cell, timeout=SECONDS)
    except WorkerError as error:
        return Verdict(cell, seconds=time.monotonic() - start, failures=[cause(str(error))])
    return judge(cell, answers, time.monotonic() - start)


def cause(traceback: str) -> str:
    """Return the line of a traceback that names the error; advice may follow it."""
    lines = traceback.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1][:300]


def line(verdict: Verdict) -> str:
    """Return one line on a cell: its differences beside their gates, and what is wrong."""
    cell = verdict.cell
    name = f"{cell.backend} {cell.precision} ×{cell.world_size} /{cell.accumulation}"
    told = [name, *filter(None, (cell.variant, cell.sabotage))]
    if verdict.reason is not None:
        return f"{' '.join(told)}: not run: {verdict.reason}"
    if (found := verdict.difference) is not None and (gate := verdict.gate) is not None:
        told.append(f"loss {found.loss:.1e} of {gate.loss:.1e},")
        told.append(f"weights {found.weight:.1e} of {gate.weight:.1e},")
    if verdict.share is not None:
        told.append(f"{verdict.share:.2f} of a replica,")
    outcome = "green" if verdict.green else f"RED: {'; '.join(verdict.failures)}"
    return f"{' '.join(told)} {verdict.seconds:.1f} s: {outcome}"
