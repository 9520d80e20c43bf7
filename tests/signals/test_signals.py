"""R3, R9, R10: a few cells of the matrix; `python -m tests.signals` runs all cells."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.signals.cells import Cell, run

SLOW = (
    Cell(signal.SIGTERM, "all", True, "training", 1),
    Cell(signal.SIGTERM, "all", True, "training", 2),
    Cell(signal.SIGINT, "rank", True, "evaluation", 2),
)


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=str)
def test_a_signal_ends_a_run(cell: Cell, tmp_path: Path) -> None:
    result = run(cell, tmp_path)
    assert result.problems(cell.expected) == [], result.output
