"""`runner report --terminal`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from runner.reporting import findings, terminal_report
from runner.run_dir import discovery
from tests.runner.written_runs import write_sweep


def shown(folder: Path) -> str:
    out = io.StringIO()
    found = findings.find(discovery.find_runs([folder]))
    terminal_report.show("[runs]", found, Console(file=out, width=200))
    return out.getvalue()


def test_a_sweep_in_text(tmp_path: Path) -> None:
    text = shown(write_sweep(tmp_path, (1e-4, 3e-4, 1e-3, 3e-3)))
    assert "[runs]" in text
    assert "█▃▂▁▁" in text
    assert "16 runs: 16 finished" in text
    assert "optimizer.lr" in text
    assert "±" in text
    assert "importance of keys" in text
    assert "300.0 MB" in text


def test_broken_runs_in_text(tmp_path: Path) -> None:
    (tmp_path / "20260101-120000-aaaa").mkdir()
    assert "1 run: 1 broken" in shown(tmp_path)
