"""The display of a sweep while it runs (S3)."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from runner.recipe.schema import Checkpoint, Recipe, Trainer
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
    for expected in ("0000", "running", "10/50", "0.5000", "accuracy 0.7500", "seed=1"):
        assert expected in drawn
    assert "1 finished of 3, 1 running" in drawn


@pytest.mark.parametrize("width", [100, 80, 60, 34])
def test_a_narrow_table_cuts_overrides_only(tmp_path: Path, width: int) -> None:
    console = Console(file=StringIO(), width=width, force_terminal=True, record=True)
    live = Live(tmp_path, 12, alone=False, console=console)
    overrides = ["optimizer.lr=0.0031622776", "model.hidden_size=128", "trainer.accumulation=8"]
    judged = Checkpoint(monitor="accuracy")
    live.started(7, overrides, Recipe(trainer=Trainer(max_steps=400), checkpoint=judged))
    live.started(8, overrides, Recipe())
    (tmp_path / "0007").mkdir()
    records = [
        {"step": 120, "split": "train", "loss": 0.5, "time": 1.0},
        {"step": 120, "split": "validation", "loss": 0.25, "accuracy": 0.75, "epoch": 1},
    ]
    text = "".join(json.dumps(one) + "\n" for one in records)
    (tmp_path / "0007" / "metrics.jsonl").write_text(text)
    live.update()
    live.close()
    plain = Console(file=StringIO(), width=width, record=True)
    plain.print(live.table())
    heads, first, second, *_ = plain.export_text().splitlines()
    assert first.split()[:3] == ["0007", "running", "120/400"]
    assert "0.7500" in first
    assert ("accuracy 0.7500" in first) is (width >= 60)
    assert "0:00" in first
    assert second.split()[:3] == ["0008", "running", "0:00"]
    assert ("…" in first) is (width > 34)
    assert {"job", "status", "step", "time"} <= set(heads.split())
    assert max(map(len, (heads, first, second))) <= width
