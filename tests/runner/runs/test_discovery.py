"""Runs below folders: found wherever they lie, jobs of sweeps among them (L1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.runs import discovery
from tests.runner.written_runs import write_run, write_sweep


def names(folder: Path) -> list[str]:
    return sorted(str(run.path.relative_to(folder)) for run in discovery.find_runs([folder]))


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    a = write_run(tmp_path / "digits" / "20260101-120000-aaaa")
    write_run(tmp_path / "b")
    (tmp_path / "digits" / "20260101-120001-bbbb" / "logs").mkdir(parents=True)  # just claimed
    (tmp_path / ".hidden").mkdir()
    write_run(tmp_path / ".hidden" / "c")
    expected = ["b", "digits/20260101-120000-aaaa", "digits/20260101-120001-bbbb"]
    assert names(tmp_path) == expected
    assert len(discovery.find_runs([tmp_path, a, tmp_path / "digits"])) == 3
    # What a run holds is no further run.
    write_run(a / "checkpoints" / "inner")
    assert names(tmp_path) == expected


def test_a_sweep_means_its_jobs(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    (sweep / "other").mkdir()
    (sweep / "0099").mkdir()  # claimed, and killed
    runs = discovery.find_runs([sweep])
    assert len(runs) == 13
    assert runs[0].sweep == sweep.name
    assert runs[-1].status == "broken"
    (one,) = discovery.find_runs([sweep / "0003"])
    assert one.sweep == sweep.name


def test_folders_without_runs_are_refused_where_runs_are_required(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert discovery.find_runs([tmp_path / "empty"]) == []
    with pytest.raises(ConfigError, match="no run lies there"):
        discovery.require_runs([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="there is no such folder"):
        discovery.find_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="it is a file"):
        discovery.find_runs([tmp_path / "file"])
