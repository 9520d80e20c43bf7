"""`runner eval A B`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from runner.reporting import evaluation_table


def test_a_row_for_each_run_and_a_reason_for_one_that_failed() -> None:
    out = io.StringIO()
    rows = [
        (Path("/runs/a"), {"step": 20, "metrics": {"test": {"loss": 0.5}}, "notes": []}),
        (
            Path("/runs/b"),
            {"step": None, "metrics": {"validation": {"loss": 0.25}}, "notes": ["other code"]},
        ),
        (Path("/runs/c"), "its checkpoint [x] is broken"),
    ]
    evaluation_table.show(rows, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["run", "step", "test", "loss", "validation", "loss"]
    assert lines[3].split() == ["/runs/a", "20", "0.5000"]
    assert lines[4].split() == ["/runs/b", "0.2500", "see", "below"]
    assert lines[5].split() == ["/runs/c", "failed"]
    assert len(lines[5].rstrip()) < 60  # the table is no wider than its numbers
    assert "/runs/b: other code" in lines
    assert "/runs/c: failed: its checkpoint [x] is broken" in lines
