"""The communicator of one process (E1, E3)."""

from __future__ import annotations

import torch

from accel.comm.base import Communicator
from accel.comm.local import LocalCommunicator


def test_one_process_finds_what_it_posted() -> None:
    comm: Communicator = LocalCommunicator()
    assert comm.posted("greeting") is None
    comm.post("greeting", "hello")
    assert comm.posted("greeting") == ["hello"]


def test_one_process_gets_copies() -> None:
    comm: Communicator = LocalCommunicator()
    own = torch.ones(2, requires_grad=True)
    for result in (comm.all_gather(own), comm.broadcast(own), comm.all_reduce(own)):
        assert result.data_ptr() != own.data_ptr()
        assert not result.requires_grad
    assert comm.all_reduce(torch.tensor([1, 2]), op="mean").tolist() == [1.0, 2.0]
