"""Processes that talk through `torch.distributed`: gloo, nccl, xccl, ….

Source: https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from accel.comm.base import Communicator, ReduceOp
from accel.comm.local import scaled
from accel.comm.rendezvous import connect_store
from accel.machine.device import synchronize
from accel.machine.errors import StateError

if TYPE_CHECKING:
    from accel.plan.plan import Plan

T = TypeVar("T")
OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13's name, and the older one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# What every backend moves; tensors of other types travel as bytes.
MOVABLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8}
    | {torch.int8, torch.int32, torch.int64}
)


@dataclass
class _Rendezvous:
    """Rendezvous store, number of groups built on it, and the default group that was built here."""

    store: Store | None = None
    address: tuple[str | None, int | None, int] | None = None
    num_groups: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    # References to the callbacks that release references to the group.
    callbacks: list[Callable[[], Callable[[], None] | None]] = field(
        default_factory=list, repr=False
    )


_RENDEZVOUS = _Rendezvous()
_INHERITED: list[_Rendezvous] = []


def _leave_to_parent() -> None:
    """Start with a rendezvous of its own, in a fork.

    The connection is the parent's; a group's end would wait for threads that only the parent has.
    """
    global _RENDEZVOUS
    _INHERITED.append(_RENDEZVOUS)
    _RENDEZVOUS = _Rendezvous()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _next_store(plan: Plan) -> Store:
    """Return a store that no earlier group or attempt wrote into.

    Groups built on a store that holds an older group's keys connect to processes that are gone:
    torch's own rendezvous fails on an elastic restart, and when one process builds a second group.
    """
    environment = plan.environment
    address = (environment.master_addr, environment.master_port, environment.restart_count)
    if _RENDEZVOUS.store is None or _RENDEZVOUS.address != address:
        timeout = plan.init.timeout or default_pg_timeout
        _RENDEZVOUS.store = connect_store(environment, timeout, plan.world_size)
        _RENDEZVOUS.address, _RENDEZVOUS.num_groups = address, 0
    _RENDEZVOUS.num_groups += 1
    prefix = f"accel/{environment.run_id}/{environment.restart_count}/{_RENDEZVOUS.num_groups}"
    return PrefixStore(prefix, _RENDEZVOUS.store)


def _build_group(plan: Plan) -> None:
    # Its functions take the group of the moment of import for a default argument, so a later import
    # (torch._dynamo's, with the first optimizer) would keep the group's threads alive for ever.
    importlib.import_module("torch.distributed.nn.functional")
    options: dict[str, Any] = {"backend": plan.backend, "rank": plan.rank}
    options["world_size"] = plan.world_size
    if plan.init.timeout is not None:
        options["timeout"] = plan.init.timeout
    if plan.backend == "nccl":  # binds the group to the device, and connects at once
        options["device_id"] = plan.device
    is_single = plan.world_size == 1 and plan.environment.master_addr is None
    if is_single and plan.init.init_method is None:
        options["store"] = HashStore()
    elif plan.init.init_method in (None, "env://"):
        options["store"] = _next_store(plan)
    else:
        options["init_method"] = plan.init.init_method
    dist.init_process_group(**options)
    _RENDEZVOUS.group = dist.group.WORLD


def _leave_at_exit() -> None:
    """Let go of the group, whether the script left it or not.

    A thread of gloo lets go of the tensors it moved some time after the collective is over, and
    takes the interpreter for that. If the interpreter is ending by then, the process aborts, or
    waits for the thread for ever. So the threads end here, with the last reference to the group,
    which should be ours: this one waits for them without holding the interpreter. What a script
    holds of the group by itself (a group of its own, say) stays with it.
    """
    with contextlib.ExitStack() as stack:  # all of it, whatever fails
        stack.callback(_leave_group)
        for reference in _RENDEZVOUS.callbacks:
            let_go = reference()
            if let_go is not None:
                stack.callback(let_go)


def _leave_group() -> None:
    """Destroy the group, if it was built here and is still there.

    No barrier: the others may be gone. After a failure an nccl group is not destroyed: that could
    wait for ranks that still compute.
    """
    failure = getattr(sys, "last_value", None)
    if dist.is_initialized() and dist.group.WORLD is _RENDEZVOUS.group:
        gloo = dist.get_backend() == "gloo"
        if gloo and failure is not None:
            _forget_locals(failure)
        if gloo or failure is None:
            dist.destroy_process_group()
    _RENDEZVOUS.group = None


def _forget_locals(failure: BaseException) -> None:
    """Clear the variables of the functions that `failure` left: some hold the group."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [failure]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in found:
            found[id(error)] = error
            traceback.clear_frames(error.__traceback__)
            waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


atexit.register(_leave_at_exit)


class TorchCommunicator(Communicator):
    """The transport of several processes, or of one under an engine that wants a group.

    Takes over the default process group where there is one, and then leaves it in place on `close`.
    Raises `StateError` if that is of another size or rank.
    """

    def __init__(self, plan: Plan) -> None:
        self.rank, self.local_rank = plan.rank, plan.local_rank
        self.world_size, self.local_world_size = plan.world_size, plan.local_world_size
        self.device = plan.device
        self.debug = plan.debug
        self._timeout = plan.init.timeout or default_pg_timeout
        if not dist.is_initialized():
            _build_group(plan)
        self._check_group()
        self.backend: str = dist.get_backend()
        # Gloo gathers in the host's memory only.
        self._wire = torch.device("cpu") if self.backend == "gloo" else plan.device

    def _check_group(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (self.rank, self.world_size):
            raise StateError(
                f"The process group has rank {rank} of {size}, the environment says {self.rank} "
                f"of {self.world_size}. Destroy the group, or correct RANK and WORLD_SIZE."
            )

    def _require_open(self) -> None:
        if self.closed or not dist.is_initialized():
            raise StateError(
                "The process group was left. Call collectives before end_training() or "
                "destroy_process_group(), or build a new Accelerator() on every process."
            )

    def _on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` contiguous, where the backend can reach it."""
        return tensor.detach().to(self._wire).contiguous()

    def barrier(self) -> None:
        """Wait until every rank is here; in debug mode gloo names the ranks that did not come."""
        self._require_open()
        if self.backend == "nccl":
            dist.barrier(device_ids=[self.device.index])
        elif self.debug and self.backend == "gloo":
            dist.monitored_barrier(timeout=self._timeout, wait_all_ranks=True)
        else:
            dist.barrier()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._require_open()
        shape = (self.world_size * tensor.shape[0], *tensor.shape[1:])
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        flat = _as_movable(self._on_wire(tensor).reshape(-1))
        gathered = flat.new_empty(self.world_size * flat.numel())
        _all_gather_single(gathered, flat)
        return gathered.view(tensor.dtype).view(shape).to(tensor.device)

    def all_gather_object(self, value: T) -> list[T]:
        self._require_open()
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", scale: float = 1.0
    ) -> torch.Tensor:
        """Return the elementwise reduction over ranks, times `scale` (booleans are counted)."""
        self._require_open()
        counted = tensor.long() if tensor.dtype == torch.bool else tensor
        result = self._on_wire(counted).clone()
        dist.all_reduce(result, op=OPS[op])
        return scaled(result, op, self.world_size, scale).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._require_open()
        if tensor.numel() == 0:
            return tensor.detach().clone()
        flat = _as_movable(self._on_wire(tensor).reshape(-1)).clone()
        dist.broadcast(flat, src=source)
        return flat.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    def broadcast_objects(self, values: Sequence[object], source: int = 0) -> list[Any]:
        self._require_open()
        received = list(values)
        dist.broadcast_object_list(received, src=source)
        return received

    def before_exit(self, let_go: Callable[[], None]) -> None:
        """Have `let_go` called when the process ends: under gloo, whose threads must end first."""
        if self.backend != "gloo":
            return
        live = [one for one in _RENDEZVOUS.callbacks if one() not in (None, let_go)]
        weak = inspect.ismethod(let_go)
        _RENDEZVOUS.callbacks = [*live, weakref.WeakMethod(let_go) if weak else lambda: let_go]

    def close(self) -> None:
        """Wait for the device and for every rank, then leave the group (if it was built here)."""
        if self.closed:
            return
        if dist.is_initialized() and dist.group.WORLD is _RENDEZVOUS.group:
            synchronize(self.device)
            self.barrier()
            dist.destroy_process_group()
            _RENDEZVOUS.group = None
        self.closed = True


def _as_movable(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype in MOVABLE else flat.view(torch.uint8)
