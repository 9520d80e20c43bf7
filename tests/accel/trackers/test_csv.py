"""One CSV file per run (R8)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from accel import Accelerator
from accel.tracking import CSVTracker


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_may_appear_later(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    config = {"optimizer": {"lr": 0.1}, "name": "digits"}
    accelerator.init_trackers("run", config=config)
    accelerator.log({"loss": torch.tensor(0.5)}, step=1)
    accelerator.log({"loss": 0.25, "parts": {"a": 1}, "note": "fine, so far"}, step=2)
    accelerator.log({"parts": {"a": 2}})
    path = accelerator.get_tracker("csv", unwrap=True)
    accelerator.end_training()
    assert path == tmp_path / "run" / "metrics.csv"
    assert path.read_text().splitlines() == [
        "step,loss,parts/a,note",
        "1,0.5,,",
        '2,0.25,1.0,"fine, so far"',
        ",,2.0,",
    ]
    assert json.loads(path.with_name("config.json").read_text()) == config


def test_a_resumed_run_appends_and_drops_later_rows(tmp_path: Path) -> None:
    first = CSVTracker("run", tmp_path)
    first.start()
    for step in range(1, 5):
        first.log({"loss": step / 8}, step=step)
    first.finish()
    with first.path.open("a") as file:
        file.write("5,0.6")  # killed while it wrote
    again = CSVTracker("run", tmp_path, purge_step=3)
    again.start()
    again.log({"loss": 1.5}, step=3)
    again.log({"accuracy": 0.5}, step=4)
    assert rows(again.path) == [
        {"step": "1", "loss": "0.125", "accuracy": ""},
        {"step": "2", "loss": "0.25", "accuracy": ""},
        {"step": "3", "loss": "1.5", "accuracy": ""},
        {"step": "4", "loss": "", "accuracy": "0.5"},
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.csv"]


def test_what_no_table_can_hold_is_refused(tmp_path: Path) -> None:
    tracker = CSVTracker("run", tmp_path)
    tracker.log({"weights": torch.zeros(3), "loss": 0.5}, step=0)
    assert rows(tracker.path) == [{"step": "0", "loss": "0.5"}]
    with pytest.raises(TypeError, match="no commit"):
        tracker.log({"loss": 1.0}, step=0, commit=True)
    with pytest.raises(NotImplementedError, match="CSVTracker"):
        tracker.log_images({"digits": torch.zeros(1, 4, 4)})
