"""Every transport keeps the contract of `Communicator`, at every world size (E1, E3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.comm.connect import connect
from accel.config.handlers import InitProcessGroupKwargs
from accel.machine.env import Environment
from accel.plan.arguments import Arguments
from accel.plan.plan import Plan, resolve
from tests.helpers import run_distributed

WORLD_SIZES = [1, 2]


def plan(**init: Any) -> Plan:
    handlers = [InitProcessGroupKwargs(**init)]
    return resolve(Arguments(cpu=True, kwargs_handlers=handlers), Environment.read())


def collect() -> dict[str, Any]:
    """Call the collectives, as far as operations on nested tensors do not show it (test_ops.py)."""
    comm = connect(plan())
    rank, size = comm.rank, comm.world_size
    own = torch.tensor([[rank, 10 * rank]])
    result = {
        "who": (rank, size, comm.local_rank, comm.local_world_size, comm.backend),
        "min": comm.all_reduce(own - 1, op="min").tolist(),
        "max": comm.all_reduce(own, op="max").tolist(),
        "counted": comm.all_reduce(torch.tensor([True, rank == 0])).tolist(),
        "sent": comm.broadcast(own, source=size - 1).tolist(),
        "sent_empty": list(comm.broadcast(torch.zeros(2, 0)).shape),
        "untouched": own.tolist(),
    }
    comm.barrier()
    comm.close()
    comm.close()
    return result


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_contract(size: int) -> None:
    everywhere = run_distributed(collect, size)
    last = size - 1
    for rank, result in enumerate(everywhere):
        assert result["who"] == (rank, size, rank, size, "gloo")
        assert result["min"] == [[-1, -1]]
        assert result["max"] == [[last, 10 * last]]
        assert result["counted"] == [size, 1]
        assert result["sent"] == [[last, 10 * last]]
        assert result["sent_empty"] == [2, 0]
        assert result["untouched"] == [[rank, 10 * rank]]


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn),
)


def move_every_dtype() -> list[bool]:
    comm = connect(plan())
    equal = []
    for dtype in DTYPES:
        own = torch.tensor([comm.rank, 1]).to(dtype)
        wanted = torch.tensor([[rank, 1] for rank in range(comm.world_size)]).to(dtype)
        gathered, sent = comm.all_gather(own[None]), comm.broadcast(own, source=1)
        equal.append(gathered.dtype == sent.dtype == dtype)
        as_bytes = [t.contiguous().view(torch.uint8).tolist() for t in (gathered, wanted)]
        equal.append(as_bytes[0] == as_bytes[1])
        equal.append(sent.view(torch.uint8).tolist() == wanted[1].view(torch.uint8).tolist())
    comm.close()
    return equal


def test_every_dtype_travels() -> None:
    for equal in run_distributed(move_every_dtype, 2):
        assert all(equal)


@pytest.mark.gpu
def test_nccl_moves_tensors_of_device_and_host() -> None:
    arguments = Arguments(kwargs_handlers=[InitProcessGroupKwargs(timeout=60)])
    base = resolve(arguments, Environment(master_addr="127.0.0.1", master_port=0))
    comm = connect(dataclasses.replace(base, backend="nccl"))
    try:
        assert comm.backend == "nccl"
        comm.barrier()
        on_device = torch.ones(2, 2, device="cuda")
        assert comm.all_gather(on_device).device.type == "cuda"
        assert comm.all_gather(torch.ones(2)).device.type == "cpu"
        assert comm.all_reduce(torch.tensor([3]), op="mean").tolist() == [3.0]
        assert comm.broadcast(torch.tensor([True])).tolist() == [True]
        assert comm.all_gather_object("x") == ["x"]
        assert comm.broadcast_objects(["y"]) == ["y"]
    finally:
        comm.close()
    assert not dist.is_initialized()
