"""Which trackers there are, and what stands for them (E1, R8)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from accel import Accelerator
from accel.machine.enums import LoggerType
from accel.machine.errors import ConfigError, MissingPackageError
from accel.trackers import table
from accel.trackers.table import TRACKERS, filter_trackers, get_available_trackers
from accel.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    WandBTracker,
    register_tracker_class,
)
from tests.accel.trackers.test_group import Memory


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own register, and TensorBoard as the only installed library."""
    monkeypatch.setattr(table, "REGISTERED", {})
    for name, entry in list(TRACKERS.items()):
        is_installed = name == "tensorboard"
        own = replace(entry, is_available=partial(bool, is_installed))
        monkeypatch.setitem(TRACKERS, name, own)


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
    for name in set(TRACKERS) - {"tensorboard"}:
        target = r"accel-runner\[trackers" if name != "aim" else "install aim"
        with pytest.raises(MissingPackageError, match=rf"log_with='{name}'.*{target}"):
            Accelerator(cpu=True, log_with=name)


def test_a_tracker_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        filter_trackers("tensorbord", "logs")
    with pytest.raises(ConfigError, match="project_dir"):
        filter_trackers("tensorboard")
    entry = table.Entry("accel.trackers.tensorboard:TensorBoardTracker", "tb", lambda: False)
    monkeypatch.setitem(table.TRACKERS, "tensorboard", entry)
    with pytest.raises(MissingPackageError, match="'tb'"):
        filter_trackers("tensorboard", "logs")
    assert filter_trackers("all", "logs") == []


def test_every_tracker_is_one_of_the_documented_words() -> None:
    assert {*TRACKERS, *table.OWN, "all"} == set(LoggerType.list())
    for name, entry in {**TRACKERS, **table.OWN}.items():
        kind = entry.load()
        assert kind.name == name
        assert kind.main_process_only is True
        writes_into_a_folder = name in ("tensorboard", "aim", "csv")
        assert kind.requires_logging_directory == writes_into_a_folder


def test_a_registered_class_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert register_tracker_class(Memory) is Memory
    assert filter_trackers(["memory", Memory]) == [Memory]
    assert filter_trackers("all", "logs") == [TensorBoardTracker, Memory]
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        filter_trackers("memry")

    class Other(Memory):
        name = "wandb"

    register_tracker_class(Other)  # in the place of a shipped one
    assert filter_trackers("wandb") == [Other]

    class Half(Memory):
        tracker = table.GeneralTracker.tracker

    with pytest.raises((NotImplementedError, ValueError), match="Half lacks tracker") as raised:
        register_tracker_class(Half)
    assert isinstance(raised.value, NotImplementedError)
    assert isinstance(raised.value, ValueError)


def test_a_trackers_object_is_used_as_it_is() -> None:
    mine = WandBTracker("project", mode="offline")  # opens nothing yet
    assert filter_trackers(mine) == [mine]
    assert mine.run_id is None


def test_the_class_of_each_tracker_is_in_the_documented_table() -> None:
    """E1: `LOGGER_TYPE_TO_CLASS`, by the names of `LoggerType`."""
    assert set(LOGGER_TYPE_TO_CLASS) == set(LoggerType.list()) - {"all"}
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert issubclass(kind, GeneralTracker)
        assert kind.name == name
    assert LOGGER_TYPE_TO_CLASS[LoggerType.TENSORBOARD] is TensorBoardTracker
