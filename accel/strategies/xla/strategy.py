"""Training through torch_xla: steps are recorded, compiled by XLA, and run by all its devices.

Nothing of a step is computed before it is dispatched: where the optimizer has stepped, and where
the next batch arrives. Both return at once; only reading a value waits for the device. Several
devices are one to the program (SPMD): each batch is sharded over them, weights are replicated, and
XLA's compiler puts the all-reduce of gradients where they are summed.

Source: https://docs.pytorch.org/xla/release/r2.9/perf/spmd_basic.html
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import torch
import torch_xla
from torch.__future__ import (
    get_swap_module_params_on_conversion,
    set_swap_module_params_on_conversion,
)
from torch_xla import runtime
from torch_xla.distributed import spmd

from accel.comm.ops import send_to_device
from accel.machine.tree import iterate
from accel.optimizer import unwrap_optimizer
from accel.strategies.base import StateIO, Strategy

if TYPE_CHECKING:
    from accel.checkpoint.optimizer_state import ParameterNames
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision

AXIS = "data"
Batch = TypeVar("Batch")


class XlaState(StateIO):
    """State dicts in the host's memory, as files are written from there."""

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by parameter name; tied ones are one tensor."""
        live = self.unwrap(model).state_dict(keep_vars=True)
        copies: dict[int, torch.Tensor] = {}
        for name, value in super().model_state(model).items():
            if id(live[name]) not in copies:
                copies[id(live[name])] = value.cpu()
        return {name: copies[id(tensor)] for name, tensor in live.items()}

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        return send_to_device(super().optimizer_state(optimizer, names), "cpu")


@final
class XlaStrategy(Strategy):
    """Each device computes its part of a batch by the same weights."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        self.state = XlaState()
        count = runtime.global_runtime_device_count()
        self._mesh = spmd.Mesh(np.arange(count), (count,), (AXIS,))

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` on the device; its parameters stay the objects that optimizers hold."""
        before = get_swap_module_params_on_conversion()
        set_swap_module_params_on_conversion(True)
        try:
            return super().wrap_model(model, place, evaluation)
        finally:
            set_swap_module_params_on_conversion(before)

    def wrap_loader(self, loader: Any) -> Any:
        """Return `loader`, each batch of which is sharded and ends the graph of what was before."""
        loader.transform = self._received
        return loader

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer`, each step of which is dispatched."""
        own = unwrap_optimizer(optimizer)
        for group in own.param_groups:
            if group.get("fused"):  # torch's kernels, which XLA has no need of
                group["fused"] = False
        own.register_step_post_hook(lambda *_: torch_xla.sync())
        return super().wrap_optimizer(optimizer, place)

    def _place(self, batch: Batch, moves: bool) -> Batch:
        return self._received(super()._place(batch, moves))

    def _received(self, batch: Batch) -> Batch:
        """Shard a batch along dim 0 over the devices, and dispatch what was recorded before it.

        XLA computes the same whatever is sharded: tensors that do not divide are replicated.
        """
        mesh, count = self._mesh, self._mesh.size()
        parts: list[Any] = [batch]
        if dataclasses.is_dataclass(batch):
            parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        for tensor in iterate(parts) if count > 1 else ():
            if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] % count == 0:
                spmd.mark_sharding(tensor, mesh, (AXIS, *[None] * (tensor.dim() - 1)))
        torch_xla.sync()
        return batch
