"""Units of FSDP2 that were frozen when it first ran, and are trained later.

FSDP2 makes out once in which dtype a unit reduces its gradients, by what it trains then. A unit
that trains nothing has none, and its first gradient would be in the format of computation.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.strategies.mesh.teardown import units_of


def reduce_what_is_unfrozen(model: torch.nn.Module) -> None:
    """Let forward passes of `model` notice units that have come to train something.

    Args:
        model: sharded.
    """
    frozen: list[Any] = list(units_of(model))

    def before(*_: Any) -> None:
        for unit in list(frozen):
            if any(parameter.sharded_param.requires_grad for parameter in unit.fsdp_params):
                unit._init_mp_dtypes()
                frozen.remove(unit)

    model.register_forward_pre_hook(before, prepend=True)
