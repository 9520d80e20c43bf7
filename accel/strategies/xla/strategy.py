"""Training through torch_xla: steps are recorded, compiled by XLA, and run by all its devices.

Nothing of a step is computed before it is dispatched: where the optimizer has stepped, and where
the next batch arrives. Both return at once; only reading a value waits for the device. Several
devices are one to the program (SPMD): each batch is sharded over them, weights are replicated, or
sharded, too, and XLA's compiler puts collectives where values of other devices are wanted.

Source: https://docs.pytorch.org/xla/release/r2.9/perf/spmd_basic.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
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
from accel.strategies.xla.spec import NAME

if TYPE_CHECKING:
    from accel.checkpoint.optimizer_state import ParameterNames
    from accel.comm.base import Communicator
    from accel.config.xla import XlaPlugin
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
        plugin: XlaPlugin | None = plan.plugin(NAME)
        self._shards_weights = plugin is not None and plugin.shard_weights

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` on the device; its parameters stay the objects that optimizers hold.

        Gradients and optimizer state, computed from them, are sharded as parameters are.
        """
        before = get_swap_module_params_on_conversion()
        set_swap_module_params_on_conversion(True)
        try:
            wrapped = super().wrap_model(model, place, evaluation)
        finally:
            set_swap_module_params_on_conversion(before)
        self._shard_weights(wrapped.parameters())
        return wrapped

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
        own.register_load_state_dict_post_hook(
            lambda loaded: self._shard_weights(iterate(list(loaded.state.values())))
        )
        return super().wrap_optimizer(optimizer, place)

    def _place(self, batch: Batch, moves: bool) -> Batch:
        return self._received(super()._place(batch, moves))

    def _received(self, batch: Batch) -> Batch:
        """Shard a batch along dim 0 over the devices, and dispatch what was recorded before it.

        XLA computes the same whatever is sharded: tensors that do not divide are replicated.
        """
        parts: list[Any] = [batch]
        if dataclasses.is_dataclass(batch):
            parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        for tensor in iterate(parts):
            self._shard(tensor, range(min(tensor.dim(), 1)))
        torch_xla.sync()
        return batch

    def _shard_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors if self._shards_weights else ():
            self._shard(tensor, range(tensor.dim()))

    def _shard(self, tensor: torch.Tensor, dims: Iterable[int]) -> None:
        """Shard a tensor over several devices along the first of `dims` that they divide."""
        count = self._mesh.size()
        dim = next((dim for dim in dims if tensor.shape[dim] % count == 0), None)
        if count > 1 and dim is not None and tensor.device.type == NAME:
            axes = [AXIS if place == dim else None for place in range(tensor.dim())]
            spmd.mark_sharding(tensor, self._mesh, tuple(axes))
