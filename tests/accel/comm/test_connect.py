"""Which transport a plan gets, with its options (E1)."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

from accel.comm.connect import connect
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
