"""Which trackers there are, and which of them a run gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel import Accelerator
from accel.enums import LoggerType
from accel.errors import ConfigError, MissingPackageError, NotBuiltError
from accel.trackers import table
from accel.trackers.table import filter_trackers, get_available_trackers
from accel.tracking import TensorBoardTracker
from tests.accel.trackers.test_group import Memory


def test_all_stands_for_what_is_installed(tmp_path: Path) -> None:
    assert get_available_trackers() == ["tensorboard"]
    assert filter_trackers(["all", "tensorboard"], str(tmp_path)) == [TensorBoardTracker]
    assert filter_trackers(None) == []


def test_trackers_are_named_to_the_accelerator(tmp_path: Path) -> None:
    for log_with in ("all", "tensorboard", LoggerType.TENSORBOARD, ["tensorboard"]):
        accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path)
        accelerator.init_trackers("run")
        assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard"]
        accelerator.end_training()
    both = Accelerator(cpu=True, log_with=["all", Memory], project_dir=tmp_path)
    assert [choice.name for choice in both.log_with] == ["tensorboard", "memory"]
    for name in ("wandb", "comet_ml"):
        with pytest.raises(NotBuiltError, match=f"log_with='{name}'"):
            Accelerator(cpu=True, log_with=name)


def test_a_tracker_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        filter_trackers("tensorbord", "logs")
    with pytest.raises(NotBuiltError, match="wandb"):
        filter_trackers("wandb", "logs")
    with pytest.raises(ConfigError, match="project_dir"):
        filter_trackers("tensorboard")
    entry = table.Entry("accel.trackers.tensorboard:TensorBoardTracker", "tb", lambda: False)
    monkeypatch.setitem(table.TRACKERS, "tensorboard", entry)
    with pytest.raises(MissingPackageError, match="pip install tb"):
        filter_trackers("tensorboard", "logs")
    assert filter_trackers("all", "logs") == []
