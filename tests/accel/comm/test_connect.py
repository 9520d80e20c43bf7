"""Which transport a plan gets, with its options (E1)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel.comm.connect import connect
from accel.comm.torch import TorchCommunicator
from accel.machine.errors import StateError
from tests.accel.comm.test_torch import plan
from tests.helpers import run_distributed


def adopt_a_group() -> tuple[list[int], bool]:
    dist.init_process_group("gloo")
    comm = connect(plan())
    ranks = comm.all_gather_object(comm.rank)
    comm.close()
    stays = dist.is_initialized()
    dist.destroy_process_group()
    return ranks, stays


def test_a_group_of_the_users_own_is_taken_over_and_left_in_place() -> None:
    assert run_distributed(adopt_a_group, 2) == [([0, 1], True)] * 2


def disagree_with_a_group() -> str:
    dist.init_process_group("gloo")
    wrong = dataclasses.replace(plan(), world_size=3)
    with pytest.raises(StateError) as caught:
        connect(wrong)
    return str(caught.value)


def test_a_group_of_another_size_is_refused() -> None:
    messages = run_distributed(disagree_with_a_group, 2)
    assert messages[1].startswith("The process group has rank 1 of 2, the environment says 1 of 3")


def options_of_the_group(path: str) -> tuple[float, float, list[int]]:
    comm = connect(plan(timeout=77, init_method=f"file://{path}", backend="gloo"))
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    ranks = comm.all_gather_object(comm.rank)
    comm.close()
    assert isinstance(comm, TorchCommunicator)
    return options._timeout.total_seconds(), comm._timeout.total_seconds(), ranks


def test_the_handler_reaches_the_group(tmp_path: Path) -> None:
    answers = run_distributed(options_of_the_group, 2, str(tmp_path / "meeting"))
    assert answers == [(77.0, 77.0, [0, 1])] * 2
