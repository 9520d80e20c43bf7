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
