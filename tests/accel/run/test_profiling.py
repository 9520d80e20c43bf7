"""Profiling: what the handler asks of torch, and the traces that each process writes (E1)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from accel import Accelerator, ProfileKwargs
from accel.machine.errors import ConfigError

CYCLE = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1}
SECOND_CYCLE = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 0}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep torch's own warnings about its profiler away; ours are looked for by `pytest.warns`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Pp]rofiler")
        yield


def work() -> None:
    torch.nn.Linear(4, 3)(torch.ones(2, 4)).sum().backward()


def profiled(**arguments: Any) -> torch.profiler.profile:
    with ProfileKwargs(activities=["cpu"], **arguments).build() as profiler:
        work()
    return profiler


def events(profiler: torch.profiler.profile, name: str = "aten::addmm") -> list[Any]:
    return [event for event in profiler.events() if event.name == name]


# -- what is recorded ----------------------------------------------------------------------------


def test_shapes_are_kept_on_request() -> None:
    assert events(profiled(record_shapes=True))[0].input_shapes[1] == [2, 4]


def test_allocations_are_kept_on_request() -> None:
    kept = profiled(profile_memory=True).key_averages()
    assert max(event.cpu_memory_usage for event in kept) > 0
    assert all(event.cpu_memory_usage == 0 for event in profiled().key_averages())


def test_operations_are_estimated_on_request() -> None:
    assert events(profiled(with_flops=True))[0].flops == 2 * 2 * 4 * 3


def test_stacks_are_kept_on_request(tmp_path: Path) -> None:
    def names(**arguments: Any) -> set[str]:
        path = tmp_path / "trace.json"
        profiled(**arguments).export_chrome_trace(str(path))
        return {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}

    assert any("test_profiling.py" in name for name in names(with_stack=True))
    assert not any("test_profiling.py" in name for name in names())


def test_modules_are_kept_on_request() -> None:
    assert profiled(with_modules=True).with_modules is True
    assert profiled().with_modules is False


def test_a_schedule_says_which_steps_are_recorded() -> None:
    schedule = ProfileKwargs(schedule_option=CYCLE).build().schedule
    assert [schedule(step).name for step in range(10)] == [
        *("NONE", "NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"),
        *("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE", "NONE"),
    ]
    schedule = ProfileKwargs(schedule_option={"active": 1}).build().schedule
    assert schedule(0).name == schedule(7).name == "RECORD_AND_SAVE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activities": ["gpu"]}, "each is one of cpu, xpu, mtia, cuda"),
        ({"schedule_option": {"warm_up": 1, "active": 1}}, "Did you mean 'warmup'?"),
        ({"schedule_option": {"wait": 1}}, "records at least one step"),
        ({"on_trace_ready": "no.such.thing"}, "dotted name"),
    ],
)
def test_what_the_profiler_does_not_know_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileKwargs(**arguments)
    assert message in str(caught.value)


# -- activities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "cuda", "xpu", "mtia"])
def test_an_activity_is_recorded(name: str) -> None:
    chosen = ProfileKwargs(activities=[name]).build().activities
    assert chosen == {getattr(ProfilerActivity, name.upper())}


def test_all_activities_are_recorded_by_default() -> None:
    assert ProfileKwargs().build().activities == set(torch.profiler.supported_activities())


# -- the accelerator's context -------------------------------------------------------------------


def test_profiling_needs_no_handler() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile() as profiler:
        work()
    assert events(profiler)


def test_the_runs_own_handler_holds_unless_another_is_given() -> None:
    own = ProfileKwargs(activities=["cpu"], record_shapes=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[own])
    with accelerator.profile() as profiler:
        work()
    assert profiler.record_shapes is True
    with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
        work()
    assert profiler.record_shapes is False


def test_a_callable_gets_each_complete_trace() -> None:
    seen = []

    def ready(profiler: torch.profiler.profile) -> None:
        seen.append(len(events(profiler)))

    handler = ProfileKwargs(activities=["cpu"], schedule_option=SECOND_CYCLE, on_trace_ready=ready)
    with Accelerator(cpu=True, kwargs_handlers=[handler]).profile() as profiler:
        for _ in range(6):
            work()
            profiler.step()
    assert seen == [1, 1]


def test_build_takes_a_callable_where_the_handler_has_none() -> None:
    seen: list[str] = []
    with ProfileKwargs(activities=["cpu"]).build(lambda profiler: seen.append("given")):
        work()
    own = ProfileKwargs(activities=["cpu"], on_trace_ready=lambda profiler: seen.append("own"))
    with own.build(lambda profiler: seen.append("given")):
        work()
    assert seen == ["given", "own"]


def test_each_cycle_of_a_schedule_is_written(tmp_path: Path) -> None:
    seen = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option=SECOND_CYCLE,
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
        output_trace_dir=str(tmp_path / "deep" / "traces"),
    )
    with Accelerator(cpu=True).profile(handler) as profiler:
        for _ in range(6):
            work()
            profiler.step()
    files = sorted(path.name for path in (tmp_path / "deep" / "traces").iterdir())
    assert files == ["profile_0.json", "profile_0_1.json"]
    assert len(seen) == 2
    assert handler.on_trace_ready is not None
    assert handler.to_kwargs()["output_trace_dir"].endswith("traces")


def test_a_trace_of_a_failed_run_is_written_too(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    with pytest.raises(RuntimeError), Accelerator(cpu=True).profile(handler):
        torch.nn.Linear(4, 3)(torch.ones(2, 5))
    assert (tmp_path / "profile_0.json").is_file()
