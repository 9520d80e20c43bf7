"""The metrics of a run, with the steps of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from runner.run_dir import measurements


def written(folder: Path, *records: dict[str, object]) -> None:
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "metrics.jsonl").write_text(f"{lines}cut off")


def record(step: int, split: str, **values: object) -> dict[str, object]:
    return {"step": step, "epoch": 1, "samples": step, "split": split, **values, "time": 1.0}


def test_validation_is_that_of_the_best_step_and_the_rest_is_the_last(tmp_path: Path) -> None:
    written(
        tmp_path,
        record(10, "validation", loss=0.9, accuracy=0.1),
        record(20, "validation", loss=0.5, accuracy=0.6, time_value=3.0),
        record(25, "train", loss=7.0),
        record(30, "validation", loss="NaN", accuracy=0.5),
        record(30, "test", loss=0.4),
    )
    metrics = {"validation": {"loss": 1, "accuracy": 0.5, "time": 1}, "test": {"loss": 0.4}}
    best = {"metrics": metrics, "best": {"step": 20}}
    assert measurements.measured(tmp_path, best) == {
        "validation": {"step": 20, "metrics": {"loss": 0.5, "accuracy": 0.6, "time": 3.0}},
        "test": {"step": 30, "metrics": {"loss": 0.4}},
    }
    for none in (None, {"step": 99}):
        found = measurements.measured(tmp_path, {"metrics": metrics, "best": none})
        assert found["validation"] == {"step": 30, "metrics": {"loss": "NaN", "accuracy": 0.5}}


def test_without_the_file_or_evaluations_there_is_nothing(tmp_path: Path) -> None:
    assert measurements.measured(tmp_path, {"metrics": {"validation": {"loss": 1.0}}}) == {}
    written(tmp_path, record(10, "train", loss=0.9))
    assert measurements.measured(tmp_path, {}) == {}


def test_a_metric_of_an_earlier_evaluation_has_its_last_value(tmp_path: Path) -> None:
    lines = [
        {"split": "validation", "step": 1, "loss": 0.5, "recall": 0.25, "time_value": 2.0},
        {"split": "train", "step": 1, "loss": 9.0},
        {"split": "validation", "step": 2, "loss": "NaN"},
    ]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert measurements.last_values(tmp_path, ("validation", "test")) == {
        "validation/loss": "NaN",
        "validation/recall": 0.25,
        "validation/time": 2.0,
    }
