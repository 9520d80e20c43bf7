"""How a run finds the study of its sweep."""

from __future__ import annotations

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
    assert study.of_run(study.job_folder(tmp_path, 7)) == (written, 7)


def test_any_other_run_belongs_to_none(tmp_path: Path) -> None:
    assert study.of_run(tmp_path / "0001") is None
    StudyFile(study.JOURNAL, "sweep", "s").write(tmp_path)
    assert study.of_run(tmp_path / "20260101-000000-abcd") is None


@pytest.mark.parametrize("content", ["{", '{"no": 1}'])
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / study.FILE).write_text(content)
    with pytest.raises(ConfigError, match="Give the command of the sweep again"):
        study.of_run(tmp_path / "0001")
