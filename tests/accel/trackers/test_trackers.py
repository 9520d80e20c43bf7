"""Trackers: what is chosen, what is written, and who writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel import Accelerator
from accel.enums import LoggerType
from accel.errors import ConfigError, MissingPackageError, NotBuiltError, StateError
from accel.trackers import table
from accel.trackers.base import flatten
from accel.trackers.table import filter_trackers, get_available_trackers
from accel.tracking import GeneralTracker, TensorBoardTracker, on_main_process
from tests.helpers import run_distributed


class Memory(GeneralTracker):
    """Keeps what it is given."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name: str, color: str = "red") -> None:
        super().__init__()
        self.run_name, self.color = run_name, color
        self.calls: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("images", values, step))

    @on_main_process
    def finish(self) -> None:
        self.calls.append(("finished",))


class Everywhere(Memory):
    """Logs on every process."""

    name = "everywhere"
    main_process_only = False


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_scalars_text_images_and_hyper_parameters(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    config = {"optimizer": {"lr": 0.1}, "name": "digits", "layers": [1, 2]}
    accelerator.init_trackers("run", config=config, init_kwargs={"tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": torch.tensor(0.5), "note": "fine"}, step=1)
    accelerator.log({"loss": 0.25, "parts": {"a": 1.0}}, step=2)
    accelerator.log_images({"digits": torch.zeros(2, 1, 4, 4)}, step=2)
    assert accelerator.get_tracker("tensorboard", unwrap=True).log_dir == str(tmp_path / "run")
    accelerator.end_training()
    assert accelerator.trackers == []
    assert scalars(tmp_path / "run")["loss"] == [(1, 0.5), (2, 0.25)]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert "digits" in events.Tags()["images"]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert json.loads((tmp_path / "run" / "hparams.yml").read_text()) == config


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tracker = TensorBoardTracker("run", tmp_path)
    with pytest.raises(TypeError, match="weights="):
        tracker.log({"weights": torch.zeros(3)}, step=0)
    with pytest.raises(TypeError, match="loss="):
        tracker.log({"loss": None}, step=0)
    tracker.finish()


def test_a_tracker_of_the_users_own_as_a_class_and_as_an_object() -> None:
    mine = Memory("mine", color="green")
    accelerator = Accelerator(cpu=True, log_with=[Everywhere, mine])
    accelerator.init_trackers(
        "project", config={"lr": 1}, init_kwargs={"everywhere": {"color": "blue"}}
    )
    made = accelerator.get_tracker("everywhere")
    assert (made.run_name, made.color) == ("project", "blue")
    assert accelerator.get_tracker("memory") is mine
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"memory": {"commit": True}})
    accelerator.log_images({"x": None}, step=4)
    accelerator.end_training()
    assert mine.calls == [
        ("config", {"lr": 1}),
        ({"loss": 1.0}, 3, {"commit": True}),
        ("images", {"x": None}, 4),
        ("finished",),
    ]
    assert made.tracker[1] == ({"loss": 1.0}, 3, {})


def test_a_tracker_class_says_what_it_lacks() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="Half"):
        Accelerator(cpu=True, log_with=Half)


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


def test_a_tracker_is_found_by_its_name_alone() -> None:
    accelerator = Accelerator(cpu=True, log_with=Memory)
    with pytest.raises(StateError, match="init_trackers"):
        accelerator.get_tracker("memory")
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        accelerator.get_tracker("memry")
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        accelerator.init_trackers("run", init_kwargs={"memry": {}})


def test_nested_configurations_become_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


def logged(folder: str) -> tuple[list[str], int, Any]:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", Everywhere], project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 1.0})
    accelerator.log({"rank": accelerator.process_index}, step=0)
    everywhere = accelerator.get_tracker("everywhere")
    own = accelerator.get_tracker("tensorboard")
    own.log({"more": 1.0}, step=0)
    raw = accelerator.get_tracker("tensorboard", unwrap=True)
    names = [tracker.name for tracker in accelerator.trackers]
    accelerator.end_training()
    return names, len(everywhere.calls), raw is None


def test_the_main_process_logs_unless_a_tracker_wants_all(tmp_path: Path) -> None:
    first, second = run_distributed(logged, 2, str(tmp_path))
    assert first == (["tensorboard", "everywhere"], 3, False)
    assert second == (["everywhere"], 3, True)
    assert scalars(tmp_path / "run")["rank"] == [(0, 0.0)]
