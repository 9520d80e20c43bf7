"""The one place that chooses a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from accel.comm.base import Communicator
from accel.comm.local import LocalCommunicator
from accel.machine.errors import StateError

if TYPE_CHECKING:
    from accel.plan.plan import Plan


def connect(plan: Plan) -> Communicator:
    """Return how the processes of `plan` talk, connected; its `backend` is None for one process."""
    if plan.backend is None:
        _check_alone()
        local = LocalCommunicator()
        local.debug = plan.debug
        return local
    from accel.comm.torch import TorchCommunicator

    return TorchCommunicator(plan)


def _check_alone() -> None:
    """Refuse a process group of the script's own that the environment knows nothing of."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    size = dist.get_world_size()
    raise StateError(
        f"The process group has {size} processes, and WORLD_SIZE is not set: each of them would "
        f"train alone. Set RANK, LOCAL_RANK, WORLD_SIZE={size}, MASTER_ADDR and MASTER_PORT (as "
        "torchrun does) before the first Accelerator."
    )
