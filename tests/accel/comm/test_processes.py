"""Who runs what, when, on which part of the data: the states and the Accelerator alike (E1)."""

from __future__ import annotations

import contextlib
import io
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.enums import DistributedType
from accel.machine.errors import StateError
from accel.state import AcceleratorState, PartialState
from accel.utils import wait_for_everyone
from tests.helpers import run_distributed

KINDS = {"partial": PartialState, "state": AcceleratorState, "accelerator": Accelerator}
SIZE = pytest.mark.parametrize("size", [1, 2])


class Noting:
    """Stands in for a communicator and notes its barriers."""

    def __init__(self, comm: Any, notes: list[str]) -> None:
        self.comm, self.notes = comm, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def barrier(self) -> None:
        self.notes.append("barrier")
        self.comm.barrier()


def each(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return what `function` answers for each kind of object; all share one process group."""
    controls = {kind: make(cpu=True) for kind, make in KINDS.items()}
    answers = {kind: function(control, *args) for kind, control in controls.items()}
    PartialState().destroy_process_group()
    return answers


def on_each(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Return what `function` answers by rank, after comparing the answers for each kind."""
    everywhere = run_distributed(each, size, function, *args)
    for answers in everywhere:
        assert answers["partial"] == answers["state"] == answers["accelerator"]
    return [answers["accelerator"] for answers in everywhere]


# -- who this is -------------------------------------------------------------------------------

ATTRIBUTES = (
    *("device", "distributed_type", "num_processes", "process_index", "local_process_index"),
    *("is_main_process", "is_local_main_process", "is_last_process", "use_distributed"),
    "mixed_precision",
)


def who(control: Any) -> dict[str, Any]:
    return {name: getattr(control, name) for name in ATTRIBUTES}


@SIZE
def test_who_a_process_is(size: int) -> None:
    for rank, found in enumerate(on_each(who, size)):
        assert found == {
            "device": torch.device("cpu"),
            "distributed_type": DistributedType.NO if size == 1 else DistributedType.MULTI_CPU,
            "num_processes": size,
            "process_index": rank,
            "local_process_index": rank,
            "is_main_process": rank == 0,
            "is_local_main_process": rank == 0,
            "is_last_process": rank == size - 1,
            "use_distributed": size > 1,
            "mixed_precision": "no",
        }


# -- decorators --------------------------------------------------------------------------------


def decorate(control: Any) -> dict[str, Any]:
    """Run each decorator in both forms, and as a function of two arguments."""

    def name(prefix: str, suffix: str = "") -> str:
        return f"{prefix}{control.process_index}{suffix}"

    bare = {
        "main": control.on_main_process(name),
        "local_main": control.on_local_main_process(name),
        "last": control.on_last_process(name),
        "process": control.on_process(name, 1),
        "local_process": control.on_local_process(name, 1),
    }
    called = {
        "main": control.on_main_process()(name),
        "local_main": control.on_local_main_process()(name),
        "last": control.on_last_process()(name),
        "process": control.on_process(process_index=1)(name),
        "local_process": control.on_local_process(local_process_index=1)(name),
    }
    assert {function.__name__ for function in [*bare.values(), *called.values()]} == {"name"}
    results = {key: bare[key]("r", suffix="!") for key in bare}
    assert results == {key: called[key]("r", suffix="!") for key in called}
    return results


@SIZE
def test_decorators_in_both_forms(size: int) -> None:
    for rank, found in enumerate(on_each(decorate, size)):
        here = f"r{rank}!"
        first, second = rank == 0, rank == 1 or size == 1  # the only process runs everything
        assert found == {
            "main": here if first else None,
            "local_main": here if first else None,
            "last": here if rank == size - 1 else None,
            "process": here if second else None,
            "local_process": here if second else None,
        }


# -- order -------------------------------------------------------------------------------------


def in_turn(control: Any, context: str) -> list[str]:
    notes: list[str] = []
    comm = control.comm
    vars(control).update(comm=Noting(comm, notes))
    with getattr(control, context)():
        notes.append("inside")
    notes.append("after")
    control.wait_for_everyone()
    vars(control).update(comm=comm)
    return notes


@SIZE
@pytest.mark.parametrize("context", ["main_process_first", "local_main_process_first"])
def test_the_main_process_goes_first(size: int, context: str) -> None:
    """The barrier is where the others wait; the main process comes there when it is done."""
    main, *others = on_each(in_turn, size, context)
    assert main == ["inside", "barrier", "after", "barrier"]
    assert others == [["barrier", "inside", "after", "barrier"]] * (size - 1)


def wait(control: Any) -> list[str]:
    notes: list[str] = []
    comm = control.comm
    vars(control).update(comm=Noting(comm, notes))
    control.wait_for_everyone()
    vars(control).update(comm=comm)
    vars(PartialState()).update(comm=Noting(comm, notes))
    notes.append("function")
    wait_for_everyone()
    vars(PartialState()).update(comm=comm)
    return notes


@SIZE
def test_everyone_is_waited_for(size: int) -> None:
    assert on_each(wait, size) == [["barrier", "function", "barrier"]] * size


# -- printing ----------------------------------------------------------------------------------


def say(control: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        control.print("a", control.process_index, sep="-", end="!")
    return out.getvalue()


@SIZE
def test_one_process_per_node_prints(size: int) -> None:
    assert on_each(say, size) == ["a-0!", *[""] * (size - 1)]


# -- parts of data -----------------------------------------------------------------------------


class Rows:
    """Like `datasets.Dataset`: rows are chosen with `select`."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("rows are not read")

    def select(self, indices: list[int]) -> Rows:
        return Rows([self.rows[index] for index in indices])


def share_out(control: Any, apply_padding: bool) -> dict[str, Any]:
    data = {
        "list": ["A", "B", "C"],
        "tuple": (1, 2, 3),
        "tensor": torch.arange(6).reshape(3, 2).t().t(),
        "range": range(3),
        "nested": {"text": ["a", "b", "c"], "more": UserDict(ids=torch.arange(3))},
        "rows": Rows([7, 8, 9]),
        "few": ["only"],
        "none": [],
    }
    parts = {}
    for name, inputs in data.items():
        with control.split_between_processes(inputs, apply_padding=apply_padding) as part:
            parts[name] = part
    nested, tensor = parts["nested"], parts["tensor"]
    assert isinstance(parts["tuple"], tuple)
    assert isinstance(nested["more"], UserDict)
    parts["nested"] = [nested["text"], nested["more"]["ids"].tolist()]
    parts["tensor"] = tensor.tolist()
    parts["rows"], parts["range"] = parts["rows"].rows, list(parts["range"])
    return parts


def expected(places: list[int], few: list[str]) -> dict[str, Any]:
    """Return what a process gets whose rows are those at `places`."""
    return {
        "list": ["ABC"[place] for place in places],
        "tuple": tuple(place + 1 for place in places),
        "tensor": [[2 * place, 2 * place + 1] for place in places],
        "range": places,
        "nested": [["abc"[place] for place in places], places],
        "rows": [place + 7 for place in places],
        "few": few,
        "none": [],
    }


def test_each_process_gets_its_part() -> None:
    assert on_each(share_out, 1, False) == [expected([0, 1, 2], ["only"])]
    assert on_each(share_out, 2, False) == [expected([0, 1], ["only"]), expected([2], [])]


def test_short_parts_are_completed_with_the_last_element() -> None:
    assert on_each(share_out, 1, True) == [expected([0, 1, 2], ["only"])]
    assert on_each(share_out, 2, True) == [expected([0, 1], ["only"]), expected([2, 2], ["only"])]


# -- agreeing to stop --------------------------------------------------------------------------


def trigger() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    answers = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    answers += [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.set_trigger()
    answers += [accelerator.check_breakpoint(), accelerator.check_breakpoint()]
    accelerator.end_training()
    return answers


@SIZE
def test_a_trigger_of_any_process_is_found_by_all_once(size: int) -> None:
    assert run_distributed(trigger, size) == [[False, True, False, True, False]] * size


# -- one run after the other -------------------------------------------------------------------


def run_again() -> list[Any]:
    first = Accelerator(cpu=True)
    first.end_training()
    second = Accelerator(cpu=True, mixed_precision="bf16")
    ranks = second.gather(torch.tensor([second.process_index])).tolist()
    kept = Accelerator(cpu=True)
    said = ""
    if second.use_distributed:
        with pytest.raises(StateError) as caught:
            first.wait_for_everyone()
        said = str(caught.value)
    second.end_training()
    return [ranks, second.mixed_precision, kept.comm is second.comm, said]


@SIZE
def test_a_new_accelerator_after_the_end_of_training_starts_a_new_run(size: int) -> None:
    for ranks, precision, shares, said in run_distributed(run_again, size):
        assert ranks == list(range(size))
        assert precision == "bf16"
        assert shares
        assert "build a new Accelerator() on every process" in said or size == 1
