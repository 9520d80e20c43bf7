"""The table of backends: a name, and where its class is. Imported only when chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel.errors import ConfigError, unknown_choice
from accel.imports import load_attribute
from accel.strategies.base import Strategy

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision

STRATEGIES: dict[str, str] = {
    "single": "accel.strategies.single:SingleProcessStrategy",
    "ddp": "accel.strategies.ddp:DDPStrategy",
    "fsdp": "accel.strategies.mesh.fsdp:FSDPStrategy",
    "tp": "accel.strategies.mesh.tp:TensorParallelStrategy",
    "deepspeed": "accel.strategies.deepspeed.strategy:DeepSpeedStrategy",
}


def find_strategy(name: str) -> type[Strategy]:
    """Return the class behind `name`.

    Raises:
        ConfigError: if the table has no such name.
    """
    if name not in STRATEGIES:
        raise ConfigError(unknown_choice("strategy", name, STRATEGIES))
    found: type[Strategy] = load_attribute(STRATEGIES[name])
    return found


def build_strategy(
    plan: Plan, comm: Communicator, device: torch.device, precision: Precision
) -> Strategy:
    """Return the backend that `plan` names."""
    return find_strategy(plan.strategy)(plan, comm, device, precision)
