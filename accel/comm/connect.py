"""The one place that chooses a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.comm.base import Communicator
from accel.comm.local import LocalCommunicator

if TYPE_CHECKING:
    from accel.plan import Plan


def connect(plan: Plan) -> Communicator:
    """Return how the processes of `plan` talk, connected.

    Args:
        plan: the resolved configuration; its `backend` is None for one process.
    """
    if plan.backend is None:
        return LocalCommunicator()
    from accel.comm.torch import TorchCommunicator

    return TorchCommunicator(plan)
