"""Gradient scaling of fp16 with sharded gradients.

Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from accel.comm.flat import by_dtype
from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError, unknown_choice
from accel.machine.memory_estimate import local
from accel.precision.amp import StepScaler, parameters_of
from accel.state import PartialState
from accel.strategies.mesh.torch_internals import (
    Models,
    gradient_values,
    unreduced_gradients,
    unscale,
)

if TYPE_CHECKING:
    from accel.comm.base import Communicator


class ShardedStepScaler(StepScaler):
    """A `StepScaler` whose ranks agree on which steps are skipped.

    torch's own takes no mixture of plain and sharded gradients in one optimizer, and looks for
    overflows on the mesh of the first gradient only. Here each rank unscales the shards that it
    holds, and one number is reduced per optimizer and step: where any rank found an overflow, all
    of them skip the step, and all scales stay equal. `models` are the distributed models
    at each call: they keep unreduced gradients.
    """

    def __init__(self, device: str, comm: Communicator, models: Models, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._comm = comm
        self._models = models

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [gradient_values(local(p.grad)) for p in parameters if p.grad is not None]

    def _scaled_gradients(self) -> list[torch.Tensor]:
        unreduced = [local(g).detach() for g in unreduced_gradients(self._models)]
        return [*super()._scaled_gradients(), *unreduced]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide this rank's gradients by the scale; return the overflow flag of all ranks."""
        parameters = parameters_of(optimizer)
        plain = [p for p in parameters if not isinstance(p.grad, DTensor)]
        view: Any = SimpleNamespace(param_groups=[{"params": plain}])
        flags = super()._unscale_grads_(view, inv_scale, found_inf, allow_fp16)
        shards = [p.grad.to_local().detach() for p in parameters if isinstance(p.grad, DTensor)]
        groups = ([shards[index] for index in indices] for indices in by_dtype(shards))
        found = [*flags.values(), *(unscale(group, inv_scale) for group in groups)]
        # Also without gradients: the other ranks wait for this one's flag.
        here = torch.stack([found_inf, *(flag.to(found_inf.device) for flag in found)]).max()
        return {found_inf.device: self._comm.all_reduce(here, "max")}


def get_grad_scaler(
    distributed_type: DistributedType | None = None, **kwargs: Any
) -> torch.amp.GradScaler:
    """Return a gradient scaler for fp16 on this process's device.

    Args:
        distributed_type: of the run; None: gradients are not sharded.
        kwargs: of `torch.amp.GradScaler`.

    Raises:
        ConfigError: for an unknown type, and for FSDP: a scaler has to know the models whose shards
            it unscales.
    """
    known = DistributedType.list()
    if distributed_type is not None and str(distributed_type) not in known:
        raise ConfigError(unknown_choice("distributed_type", distributed_type, known))
    if distributed_type == DistributedType.FSDP:
        raise ConfigError.of(
            f"get_grad_scaler({distributed_type})",
            "ranks agree on overflows only through the scaler of the run",
            "Use accelerator.scaler, with mixed_precision='fp16'.",
        )
    return StepScaler(PartialState().device.type, **kwargs)
