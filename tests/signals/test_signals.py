"""A few cells of the matrix, and a few odd endings; `python -m tests.signals` runs all cells."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers import python
from tests.signals.cells import COMMAND, RECIPE, ROOT, Cell, run

SLOW = (
    Cell(signal.SIGTERM, "all", True, "training", 2),
    Cell(signal.SIGINT, "rank", True, "evaluation", 2),
)
HANG = ("trainer.hang_timeout=5", "objective.ending=hang")
ENDINGS = {
    "objective.ending=exit_0": "rank 1 failed first: EndedByOwnCodeError: os._exit(0)",
    "objective.ending=wordless": "rank 1 failed first: Wordless: (its message cannot be told",
    "data.ending=stop_iteration": "rank 1 failed first: DataError: the data set Samples raised",
    " ".join(HANG): "rank 1 failed first: it hangs: no progress for",
}


def check(cell: Cell, folder: Path) -> None:
    result = run(cell, folder)
    assert (result.code, result.saved) == cell.expected, result.output
    assert result.resumable == result.saved
    assert result.orphans == 0


def test_sigterm_to_all_processes_saves(tmp_path: Path) -> None:
    check(Cell(signal.SIGTERM, "all", True, "training", 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=str)
def test_a_signal_ends_a_run(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ENDINGS)
def test_an_odd_ending_names_rank_and_cause(arguments: str, tmp_path: Path) -> None:
    two = ("distributed=multi_cpu", "distributed.num_processes=2")
    ended = subprocess.run(
        python("-c", COMMAND, *RECIPE, *two, *arguments.split()),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1
    assert ENDINGS[arguments] in ended.stderr
