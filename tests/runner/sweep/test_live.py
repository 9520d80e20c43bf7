"""The display of a sweep while it runs (S3)."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from runner.recipe.schema import Recipe, Trainer
from runner.sweep.live import Live
from tests.runner.sweep.stand_ins import begin_job, end_job


def shown(folder: Path, *, terminal: bool = False, alone: bool = False) -> tuple[Live, StringIO]:
    text = StringIO()
    console = Console(file=text, width=100, force_terminal=terminal)
    return Live(folder, 3, 1, alone=alone, common=["a=1"], console=console), text


def test_plain_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    still = SimpleNamespace(monotonic=lambda: 5.0)
    monkeypatch.setattr("runner.sweep.live.time", still)
    live, text = shown(tmp_path)
    live.started(2, ["a=1", "seed=[1]"], Recipe())
    end_job(begin_job(tmp_path, 2), 0.5)
    live.ended(2, 0, 0)
    live.started(1, ["seed=2"], Recipe())
    live.ended(1, 1, -9)
    live.update()
    live.close()
    lines = text.getvalue().splitlines()
    assert lines[0] == "job 0002 of 3 starts  seed=[1]"
    assert lines[1] == "job 0002 finished  0:00  objective 0.5000  seed=[1]"
    assert "job 0001 failed (its process was ended by SIGKILL" in lines[3]
    assert str(tmp_path / "0001" / "logs") in lines[3]


def test_the_death_of_a_process_is_told_in_any_case(tmp_path: Path) -> None:
    live, text = shown(tmp_path, alone=True)
    live.started(0, ["seed=1"], Recipe())
    live.ended(0, 1, -9)
    live.started(1, ["seed=2"], Recipe())
    live.ended(1, 1, 1)  # it has printed its error itself
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(
        "job 0000 failed (its process was ended by SIGKILL (out of memory?))"
    )
    assert lines[1].endswith("seed=1")
    assert "logs" not in lines[1]


def test_the_table_has_steps_and_losses_from_the_runs(tmp_path: Path) -> None:
    live, _ = shown(tmp_path, terminal=True)
    live.started(0, ["seed=1"], Recipe(trainer=Trainer(max_steps=50)))
    (tmp_path / "0000").mkdir()
    records = [
        {"step": 10, "split": "train", "loss": 0.5, "time": 1.0},
        {"step": 10, "split": "validation", "accuracy": 0.75, "epoch": 1, "samples": 5},
    ]
    text_of = "cut off\n" + "".join(json.dumps(one) + "\n" for one in records)
    (tmp_path / "0000" / "metrics.jsonl").write_text(text_of)
    live.update()
    live.close()
    console = Console(width=100, file=StringIO(), record=True)
    console.print(live.table())
    drawn = console.export_text()
    for expected in ("0000", "10/50", "0.5000", "accuracy 0.7500", "seed=1"):
        assert expected in drawn
    assert "1 finished of 3, 1 running" in drawn
