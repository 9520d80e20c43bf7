"""`runner report --terminal`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from runner.reporting import findings, terminal_report
from runner.run_dir import discovery
from tests.runner.written_runs import write_run, write_sweep


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


def test_a_group_of_one_seed_has_no_deviation(tmp_path: Path) -> None:
    for number, (width, seed) in enumerate(((16, 0), (16, 1), (32, 0))):
        values = {"model.width": width, "seed": seed}
        write_run(tmp_path / f"{number}", values, best=0.2 + number / 10)
    lines = [line.split() for line in shown(tmp_path).splitlines()]
    assert ["model.width=16", "2", "2", "0.2500", "±", "0.0707"] in lines
    assert ["model.width=32", "1", "1", "0.4000"] in lines


def test_broken_runs_in_text(tmp_path: Path) -> None:
    (tmp_path / "20260101-120000-aaaa").mkdir()
    assert "1 run: 1 broken" in shown(tmp_path)


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    (tmp_path / "a" / "environment.json").write_text("{")
    text = shown(tmp_path)
    assert "2 runs: 1 finished, 1 finished (damaged)" in text
    assert text.count("finished (damaged)") == 2
    assert "environment.json is damaged" in text
