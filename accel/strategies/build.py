"""From a plan to its strategy. Its class is imported only when it is chosen."""

from __future__ import annotations

import torch

from accel.comm.base import Communicator
from accel.imports import load_attribute
from accel.planning.plan import Plan
from accel.precision.base import Precision
from accel.strategies.base import Strategy


def build_strategy(
    plan: Plan, comm: Communicator, device: torch.device, precision: Precision
) -> Strategy:
    """Return the strategy that `plan` names."""
    strategy: Strategy = load_attribute(plan.spec.place)(plan, comm, device, precision)
    return strategy
