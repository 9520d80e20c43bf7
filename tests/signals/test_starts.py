"""R3, R9, R10: some starts and endings; `python -m tests.signals.starts` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.signals.starts import Cell, cells, run
from tests.tiers import one_in


@pytest.mark.slow
@pytest.mark.parametrize("cell", one_in(6, cells(), lambda cell: "-".join(str(cell).split())))
def test_nothing_stays_behind(cell: Cell, tmp_path: Path) -> None:
    result = run(cell, tmp_path)
    assert result.problems(cell) == [], result.output


@pytest.mark.slow  # it starts three processes, which import PyTorch
def test_a_killed_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    cell = Cell("torchrun", "kill parent")
    assert run(cell, tmp_path).left == ()
