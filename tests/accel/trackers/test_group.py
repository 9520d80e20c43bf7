"""The trackers of a run, opened together (E1, R8)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel import Accelerator
from accel.machine.errors import ConfigError, StateError
from accel.tracking import GeneralTracker, on_main_process
from tests.helpers import ROOT, python, run_distributed


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


@pytest.mark.parametrize("method", ["log", "log_images"])
@pytest.mark.parametrize("log_with", [None, Memory])
def test_arguments_of_a_call_name_a_tracker(method: str, log_with: type[Memory] | None) -> None:
    accelerator = Accelerator(cpu=True, log_with=log_with)
    accelerator.init_trackers("run")
    before = [list(tracker.tracker) for tracker in accelerator.trackers]
    record = getattr(accelerator, method)
    with pytest.raises(ConfigError, match=r"log_kwargs\['memry'\]: no such tracker is used"):
        record({"x": 1}, log_kwargs={"memry": {"commit": True}})
    assert [tracker.tracker for tracker in accelerator.trackers] == before
    record({"x": 1}, log_kwargs={"wandb": {"commit": True}})  # as with init_kwargs
    assert len(accelerator.trackers) == (0 if log_with is None else 1)
    after = [tracker.tracker for tracker in accelerator.trackers]
    assert [len(calls) for calls in after] == [len(calls) + 1 for calls in before]
    accelerator.end_training()


def test_an_argument_that_a_tracker_does_not_take_is_told_with_its_place(tmp_path: Path) -> None:
    for name, typo in (("csv", "purge"), ("tensorboard", "flush_sec")):
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=tmp_path)
        message = rf"init_kwargs\['{name}'\] with {typo}: .*unexpected keyword argument '{typo}'"
        with pytest.raises(ConfigError, match=message):
            accelerator.init_trackers("run", init_kwargs={name: {typo: 1}})


class Broken(Memory):
    """Cannot be closed."""

    name = "broken"

    def finish(self) -> None:
        super().finish()
        raise OSError("disk full")


def test_all_are_closed_once_though_one_fails() -> None:
    first, last = Broken("first"), Memory("last")
    accelerator = Accelerator(cpu=True, log_with=[first, last])
    accelerator.init_trackers("run")
    with pytest.raises(OSError, match="disk full"):
        accelerator.tracker_group.finish(failed=True)
    accelerator.end_training()
    assert (first.calls, last.calls) == ([("finished",)], [("finished",)])
    assert (first.failed, last.failed) == (True, True)


def test_images_go_to_the_trackers_that_have_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Memory("mine")
    both = Accelerator(cpu=True, log_with=["csv", mine], project_dir=tmp_path)
    both.init_trackers("run")
    both.log_images({"x": None}, step=1)
    assert mine.calls == [("images", {"x": None}, 1)]
    assert "'csv' does not log images" in caplog.text
    both.end_training()
    alone = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    alone.init_trackers("run")
    with pytest.raises(NotImplementedError, match="csv"):
        alone.log_images({"x": None}, step=1)
    alone.end_training()


class Numbered(Memory):
    """Has run ids."""

    name = "numbered"

    def __init__(self, run_name: str, number: str = "new") -> None:
        super().__init__(run_name)
        self.number = number

    @property
    def run_id(self) -> str:
        return self.number

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        return {"number": run_id}


def test_a_resumed_run_continues_its_trackers_runs(tmp_path: Path) -> None:
    before = Accelerator(cpu=True, log_with=[Numbered, Memory])
    before.init_trackers("run", init_kwargs={"numbered": {"number": "seven"}})
    before.save_state(str(tmp_path / "state"))
    before.end_training()
    after = Accelerator(cpu=True, log_with=[Numbered, Memory])
    after.load_state(str(tmp_path / "state"))
    assert after.tracker_group.run_ids() == {"numbered": "seven"}  # a state before they are open
    after.init_trackers("run")
    assert after.get_tracker("numbered").number == "seven"
    after.init_trackers("run")  # only the next one continues it
    assert after.get_tracker("numbered").number == "new"
    after.load_state(str(tmp_path / "state"))
    after.init_trackers("run", init_kwargs={"numbered": {"number": "eight"}})
    assert after.get_tracker("numbered").number == "eight"
    after.end_training()


def test_a_state_loaded_after_init_trackers_continues_its_runs(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    before = Accelerator(cpu=True, log_with=Numbered)
    before.init_trackers("run", init_kwargs={"numbered": {"number": "seven"}})
    before.save_state(state)
    before.end_training()
    after = Accelerator(cpu=True, log_with=[Numbered, Memory])
    after.init_trackers("run", config={"lr": 1})
    empty, other = after.trackers
    after.load_state(state)
    continued = after.get_tracker("numbered")
    assert (continued.number, continued.calls) == ("seven", [("config", {"lr": 1})])
    assert isinstance(empty, Numbered)
    assert empty.calls == [("config", {"lr": 1}), ("finished",)]
    assert after.get_tracker("memory") is other
    after.init_trackers("next")  # a run of its own
    assert after.get_tracker("numbered").number == "new"
    after.end_training()


class Buffering(Numbered):
    """Has an id once its buffer is written, and refuses some values."""

    name = "buffering"

    def flush(self) -> None:
        self.calls.append(("flushed",))
        self.number = "flushed"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ValueError("refused")


def test_a_tracker_that_fails_keeps_nothing_from_the_others() -> None:
    last = Memory("last")
    accelerator = Accelerator(cpu=True, log_with=[Buffering, last])
    accelerator.init_trackers("run")
    with pytest.raises(ValueError, match="refused"):
        accelerator.log({"loss": 1.0}, step=1)
    assert last.calls == [({"loss": 1.0}, 1, {})]
    accelerator.end_training()


UNFINISHED = """
import sys
from accel import Accelerator
from tests.accel.trackers.test_group import Memory

class Loud(Memory):
    name = "loud"
    def finish(self):
        print("finished", self.failed)

accelerator = Accelerator(cpu=True, log_with=Loud)
accelerator.init_trackers("run")
if sys.argv[1] == "ended":
    accelerator.end_training()
elif sys.argv[1] == "error":
    raise ValueError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "printed"), [("ended", "False"), ("forgotten", "False"), ("error", "True")]
)
def test_a_script_that_ends_anyhow_closes_its_trackers_once(way: str, printed: str) -> None:
    done = subprocess.run(python("-c", UNFINISHED, way), capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == [f"finished {printed}"], done.stderr


def logged(folder: str) -> tuple[list[str], int, Any]:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", Everywhere], project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 1.0})
    accelerator.log({"rank": accelerator.process_index}, step=0)
    everywhere = accelerator.get_tracker("everywhere")
    own = accelerator.get_tracker("tensorboard")
    own.log({"more": 1.0}, step=0)
    # E1: what works on the main process does nothing on the others.
    assert own.add_text("note", "fine") is None
    own.flush()
    assert (own.writer is None) == (not accelerator.is_main_process)
    raw = accelerator.get_tracker("tensorboard", unwrap=True)
    names = [tracker.name for tracker in accelerator.trackers]
    accelerator.end_training()
    return names, len(everywhere.calls), raw is None


def test_the_main_process_logs_unless_a_tracker_wants_all(tmp_path: Path) -> None:
    first, second = run_distributed(logged, 2, str(tmp_path))
    assert first == (["tensorboard", "everywhere"], 3, False)
    assert second == (["everywhere"], 3, True)
    assert scalars(tmp_path / "run")["rank"] == [(0, 0.0)]
