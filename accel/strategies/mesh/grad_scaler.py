"""Gradient scaling of fp16 where each process holds a part of the gradients.

Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from accel.memory_estimate import local
from accel.precision.amp import StepScaler
from accel.strategies.mesh.resharding import unreduced_gradients

if TYPE_CHECKING:
    from accel.comm.base import Communicator


class ShardedStepScaler(StepScaler):
    """A `StepScaler` whose processes agree on which steps are skipped.

    torch's own takes no mixture of whole and split gradients in one optimizer, and looks for
    overflows on the mesh of the first gradient alone. Here each process unscales what it holds,
    and one number is exchanged per optimizer and step: where any process met an overflow, all of
    them skip, and all scales stay equal.

    Args:
        device: kind of device.
        comm: how processes talk.
        models: returns those that are sharded: they keep gradients of their own in a window.
        kwargs: fields of `GradScalerKwargs`.
    """

    def __init__(
        self,
        device: str,
        comm: Communicator,
        models: Callable[[], Iterable[torch.nn.Module]],
        **kwargs: Any,
    ) -> None:
        super().__init__(device, **kwargs)
        self._comm = comm
        self._models = models

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this process's parts of the gradients that are there."""
        parts = [local(p.grad) for p in parameters if p.grad is not None]
        return [part._values() if part.is_sparse else part.detach() for part in parts]

    def _scaled_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are there and scaled, also those that wait to be reduced."""
        waiting = [local(g).detach() for g in unreduced_gradients(self._models())]
        return [*super()._scaled_gradients(), *waiting]

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Divide this process's gradients by the scale; return what all processes found."""
        entries = [p for group in optimizer.param_groups for p in group["params"]]
        whole = [p for p in entries if not isinstance(p.grad, DTensor)]
        view: Any = SimpleNamespace(param_groups=[{"params": whole}])
        flags = super()._unscale_grads_(view, inv_scale, found_inf, allow_fp16)
        parts = [p.grad.to_local().detach() for p in entries if isinstance(p.grad, DTensor)]
        found = [*flags.values(), *_unscale(parts, inv_scale)]
        # Also if there is nothing to unscale: the others wait for this process's answer.
        here = torch.stack([found_inf, *(flag.to(found_inf.device) for flag in found)]).max()
        return {found_inf.device: self._comm.all_reduce(here, "max")}


def _unscale(parts: list[torch.Tensor], inv_scale: torch.Tensor) -> list[torch.Tensor]:
    """Multiply `parts` by `inv_scale` in place; return flags [] that tell of overflows."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        kinds.setdefault((part.device, part.dtype), []).append(part)
    flags = []
    for (device, _), same in kinds.items():
        flag = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, flag, inv_scale.to(device))
        flags.append(flag)
    return flags
