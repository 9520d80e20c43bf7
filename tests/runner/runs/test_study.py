"""How a run finds the study of its sweep (S4)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.runs import study
from runner.runs.study import StudyFile


def test_a_job_finds_the_study_and_its_number(tmp_path: Path) -> None:
    written = StudyFile(study.JOURNAL, "sweep", mode="max", pruner={"name": "median"})
    written.write(tmp_path)
    found = study.of_run(study.job_folder(tmp_path, 7))
    assert found is not None
    assert found[1] == 7
    assert (found[0].mode, found[0].pruner) == ("max", {"name": "median"})


@pytest.mark.parametrize("content", ["{", '{"no": 1}'])
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / study.FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"Restore it from a copy, .*sweep\.dir=DIR"):
        study.of_run(tmp_path / "0001")


SUMMARY = {
    "best": {"value": 0.5},
    "seconds": 3.0,
    "metrics": {"validation": {"loss": 0.75, "accuracy": "NaN"}},
}


@pytest.mark.parametrize(
    ("metric", "value"), [("best", 0.5), ("seconds", 3.0), ("validation/loss", 0.75)]
)
def test_objectives_are_read_from_the_summary(metric: str, value: float) -> None:
    assert study.value_of(SUMMARY, metric) == value


BOTH = ("test/accuracy", "validation/loss")


def lines(folder: Path, *records: dict[str, object]) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))


def summary_of_test(**changes: object) -> dict[str, object]:
    """Return the summary of a run of 12 steps, whose test used the weights of step 4."""
    metrics = {"validation": {"loss": 0.75}, "test": {"accuracy": 0.5}}
    return {"step": 12, "weights_step": 4, "metrics": metrics, **changes}


def test_objectives_of_both_splits_are_of_the_weights_that_were_tested(tmp_path: Path) -> None:
    lines(
        tmp_path,
        {"split": "validation", "step": 4, "loss": 0.25},
        {"split": "validation", "step": 12, "loss": 0.75, "recall": 0.5},
        {"split": "test", "step": 12, "weights_step": 4, "accuracy": 0.5},
    )
    assert study.values_of(summary_of_test(), BOTH, tmp_path) == [0.5, 0.25]
    assert study.values_of(summary_of_test(), ("validation/loss", "step"), tmp_path) == [0.75, 12]
    assert study.step_of(summary_of_test(), BOTH) == 4
    assert study.step_of(summary_of_test(), ("validation/loss",)) == 12
    with pytest.raises(ConfigError, match="at step 4, whose weights were tested, the run measures"):
        study.values_of(summary_of_test(), ("test/accuracy", "validation/recall"), tmp_path)


def test_a_metric_of_an_earlier_evaluation_has_its_last_value(tmp_path: Path) -> None:
    lines = [
        {"split": "validation", "step": 1, "loss": 0.5, "recall": 0.25, "time_value": 2.0},
        {"split": "train", "step": 1, "loss": 9.0},
        {"split": "validation", "step": 2, "loss": "Infinity"},
    ]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert study.last_values(tmp_path, ("validation", "test")) == {
        "validation/loss": math.inf,
        "validation/recall": 0.25,
        "validation/time": 2.0,
    }
