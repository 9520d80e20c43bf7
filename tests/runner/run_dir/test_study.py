"""How a run finds the study of its sweep."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from accel.errors import ConfigError
from runner.run_dir import study
from runner.run_dir.study import StudyFile


def test_a_job_finds_the_study_and_its_number(tmp_path: Path) -> None:
    written = StudyFile(
        study.JOURNAL, "sweep", tmp_path.name, mode="max", pruner={"name": "median"}
    )
    written.write(tmp_path)
    found = study.of_run(study.job_folder(tmp_path, 7))
    assert found is not None
    assert found[1] == 7
    assert (found[0].mode, found[0].pruner, found[0].sweep) == (
        *("max", {"name": "median"}),
        tmp_path.name,
    )


def test_any_other_run_belongs_to_none(tmp_path: Path) -> None:
    assert study.of_run(tmp_path / "0001") is None
    StudyFile(study.JOURNAL, "sweep", "s").write(tmp_path)
    assert study.of_run(tmp_path / "20260101-000000-abcd") is None


@pytest.mark.parametrize("content", ["{", '{"no": 1}'])
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / study.FILE).write_text(content)
    with pytest.raises(ConfigError, match="Give the command of the sweep again"):
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


def test_what_was_not_measured_is_no_number() -> None:
    assert math.isnan(study.value_of({"best": None}, "best"))
    assert math.isnan(study.value_of(SUMMARY, "validation/accuracy"))


def test_a_metric_that_a_run_does_not_measure_is_told() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'validation/loss'"):
        study.value_of(SUMMARY, "validation/los")
