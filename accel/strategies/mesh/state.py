"""State dicts of models whose parameters are DTensors: gathered and sharded again, or in shards.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, parameters
from accel.machine.memory import local
from accel.optimizer import unwrap_optimizer
from accel.plan.dims import ParallelDims
from accel.strategies.base import StateIO
from accel.strategies.mesh.hooks import forget_scales, reshard
from accel.strategies.mesh.pipeline import pipeline_of, pipelines
from accel.strategies.mesh.torch_internals import Models, local_sizes_and_offsets

if TYPE_CHECKING:
    from accel.checkpoint.sharded import Allocate, Place
    from accel.config.fsdp import FullyShardedDataParallelPlugin


class MeshState(StateIO):
    """Full state dicts, gathered from shards and sharded again when they are loaded; or sharded.

    Args:
        dims: sizes of the mesh.
        fsdp: the plugin, whose `state_dict_type` may change; None where FSDP is off.
        gathers_fp8: whether weights are gathered in fp8, by scales that follow the weights.
        models: that are distributed; full state of one in stages is that of all its stages.
    """

    def __init__(
        self,
        dims: ParallelDims,
        fsdp: FullyShardedDataParallelPlugin | None,
        gathers_fp8: bool = False,
        models: Models = (),
    ) -> None:
        self._dims = dims
        self._fsdp = fsdp
        self._gathers_fp8 = gathers_fp8
        self._models = models

    @property
    def sharded(self) -> tuple[str, ...]:
        if self._fsdp is None:
            sizes = {"the model's stages": self._dims.pp, "the weights of tp_plan": self._dims.tp}
            return tuple(name for name, size in sizes.items() if size > 1)
        is_sharded = max(self._dims.dp_shard, self._dims.cp, self._dims.tp) > 1
        return ("parameters", "gradients", "optimizer state") if is_sharded else ()

    def expose(self, own: torch.nn.Module) -> None:
        """Reshard the parameters: a forward may have gathered them."""
        reshard(own)
        if (pipeline := pipeline_of(self._models, own)) is not None:
            for stage in pipeline.stages.values():
                reshard(stage)

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return full tensors in the host's memory, on all ranks."""
        own = self.unwrap(model)
        state = own.state_dict(keep_vars=True)
        gathered: dict[int, torch.Tensor] = {}
        for value in state.values():  # a tied weight is gathered once
            if isinstance(value, torch.Tensor) and id(value) not in gathered:
                gathered[id(value)] = full_tensor(value)
        # What is no tensor is the extra state of a module.
        full = {name: gathered.get(id(value), value) for name, value in state.items()}
        pipeline = pipeline_of(self._models, own)
        return full if pipeline is None else pipeline.full_model(full)

    @property
    def saves_shards(self) -> bool:
        return self._fsdp is not None and self._fsdp.saves_shards

    def sharded_model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()

    def sharded_optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        saved = super().optimizer_state(optimizer, names)
        for pipeline in pipelines(self._models):
            saved = pipeline.named_optimizer(unwrap_optimizer(optimizer), saved)
        return saved

    def allocate_weights(self, model: torch.nn.Module) -> Allocate:
        """Return a function that allocates the shards of this rank; what does not fit, on meta."""
        targets = self.unwrap(model).state_dict()

        def allocate(place: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            target = targets.get(str(place[0]))
            fits = isinstance(target, torch.Tensor) and target.shape == size
            if fits and isinstance(target, DTensor):
                return empty_shard(target, dtype)
            return torch.empty(size, dtype=dtype, device="cpu" if fits else "meta")

        return allocate

    def allocate_state(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> Allocate:
        """Return a function that allocates the shards of this rank for the optimizer's state.

        That of other stages is on meta.
        """
        own = unwrap_optimizer(optimizer)
        live = dict(zip(names.keys(own), parameters(own), strict=True))
        stages = [(one.first_key, one.others(own, names)) for one in pipelines(self._models)]

        def allocate(place: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            if any(first(str(place[0])) in others for first, others in stages):
                return torch.empty(size, dtype=dtype, device="meta")
            target = live.get(names.canonical(str(place[0])))
            if isinstance(target, DTensor) and target.shape == size and size:
                return empty_shard(target, dtype)
            return torch.empty(size, dtype=dtype)

        return allocate

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        own = self.unwrap(model)
        targets = own.state_dict()
        if (pipeline := pipeline_of(self._models, own)) is not None:
            state = pipeline.part_of_model(state, targets)
        shards = {name: shard_like(value, targets.get(name)) for name, value in state.items()}
        own.load_state_dict(shards, strict=strict)
        if self._gathers_fp8:
            forget_scales(own)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        saved = self.sharded_optimizer_state(optimizer, names)
        kinds = ("state", "other_state", "extra")
        full = saved | {kind: full_tensors(saved[kind]) for kind in kinds}
        for pipeline in pipelines(self._models):
            full = pipeline.full_optimizer(full)
        return full

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        own = unwrap_optimizer(optimizer)
        for pipeline in pipelines(self._models):
            state = pipeline.part_of_optimizer(own, state, names)
        live = dict(zip(names.keys(own), parameters(own), strict=True))
        shards = {
            key: shard_state(entry, live.get(names.canonical(key)))
            for key, entry in state.get("state", {}).items()
        }
        load_by_name(own, state | {"state": shards}, names)


# -- tensors -------------------------------------------------------------------------------


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in full and in the host's memory; collective over the mesh of a DTensor."""
    if not isinstance(value, DTensor):
        return value.detach().cpu()
    mesh, shard = value.device_mesh, local(value).detach()
    if shard.device.type != mesh.device_type:  # offloaded: collectives run on the mesh's device
        value = DTensor.from_local(
            shard.to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return cast("DTensor", value.detach()).full_tensor().cpu()


def full_tensors(value: object) -> object:
    """Return nested dicts, lists and tuples with every tensor in full; collective."""
    if isinstance(value, dict):
        return {key: full_tensors(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(full_tensors(entry) for entry in value)
    return full_tensor(value) if isinstance(value, torch.Tensor) else value


def shard(value: torch.Tensor, target: DTensor) -> DTensor:
    """Return this rank's shard of a full tensor, placed as `target`; no communication.

    Args:
        value: [...] of the shape of `target`; its dtype is kept.
        target: gives mesh, placements and device.
    """
    mesh, placements = target.device_mesh, target.placements
    own = value.detach()
    for dim, (size, offset) in enumerate(local_sizes_and_offsets(target.shape, mesh, placements)):
        own = own.narrow(dim, min(offset, own.shape[dim]), size)
    own = own.to(target.to_local().device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def empty_shard(target: DTensor, dtype: torch.dtype) -> DTensor:
    """Return this rank's shard of a tensor like `target`, of any values; no communication."""
    return DTensor.from_local(
        torch.empty_like(target.to_local(), dtype=dtype, memory_format=torch.contiguous_format),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def shard_like(value: Any, target: torch.Tensor | None) -> Any:
    """Return `value` sharded like `target` where it is a full tensor of the same shape.

    Of another shape it stays: torch names a weight that does not fit.
    """
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor):
        return value
    is_full = not isinstance(value, DTensor) and value.shape == target.shape and value.dim() > 0
    return shard(value, target) if is_full else value


def shard_state(entry: object, target: torch.Tensor | None) -> object:
    """Return an optimizer's state of one parameter, sharded like `target`."""
    if not isinstance(entry, dict):
        return shard_like(entry, target)
    return {name: shard_like(value, target) for name, value in entry.items()}
