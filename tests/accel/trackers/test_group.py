"""The trackers of a run, opened together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel import Accelerator
from accel.errors import ConfigError, StateError
from accel.tracking import GeneralTracker, on_main_process
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


def test_a_tracker_is_found_by_its_name_alone() -> None:
    accelerator = Accelerator(cpu=True, log_with=Memory)
    with pytest.raises(StateError, match="init_trackers"):
        accelerator.get_tracker("memory")
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        accelerator.get_tracker("memry")
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        accelerator.init_trackers("run", init_kwargs={"memry": {}})


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
