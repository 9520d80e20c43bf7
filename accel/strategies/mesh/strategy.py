"""Models whose parameters are DTensors on one `DeviceMesh`: FSDP2, tensor parallelism, both.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.comm.rng import synchronize_rng_states
from accel.config.parallelism import RING, join_axes
from accel.machine.device import synchronize
from accel.machine.errors import ConfigError
from accel.optimizer import unwrap_optimizer
from accel.plan.dims import CP, PP
from accel.precision.amp import parameters_of
from accel.strategies.base import Accumulation, Batch, Objects, Strategy
from accel.strategies.context_parallel import ContextParallel
from accel.strategies.mesh.device_mesh import build_mesh, check_given, destroy_mesh, joined
from accel.strategies.mesh.gradients import (
    MeshGradients,
    MeshSync,
    average_gradients,
)
from accel.strategies.mesh.hooks import (
    forget_after_steps,
    gathers_in_fp8,
    reshard_before_steps,
    scale_before_forwards,
    step_by_mesh,
)
from accel.strategies.mesh.parallelize import parallelize, parallelize_stages, read_settings
from accel.strategies.mesh.parameters import ParameterRemap, parameters_by_name
from accel.strategies.mesh.pipeline import Pipeline, Pipelined, pipelines
from accel.strategies.mesh.spec import FSDP, PIPELINE
from accel.strategies.mesh.stages import Gate
from accel.strategies.mesh.state import MeshState
from accel.strategies.mesh.tensor_parallel import check_first_step
from accel.strategies.mesh.torch_internals import (
    clear_mesh_caches,
    ring_attention,
    unsharded_and_sharded,
)
from accel.strategies.mesh.units import check_classes
from accel.strategies.optimizers import NO_DTENSOR, named_kind, quantized_kind

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision


class MeshModels:
    """Models distributed over a mesh, which is destroyed at `close` or when the process ends.

    Optimizers hold this object: it outlives a strategy that nobody references any more. Models are
    not kept alive.
    """

    def __init__(self, meshes: Iterable[DeviceMesh], comm: Communicator) -> None:
        self._meshes = [one for mesh in meshes for one in (mesh, *join_axes(mesh))]
        self.is_destroyed = False
        self._comm = comm
        # Each with its parameters that FSDP2 ignores.
        self.ignored: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]]
        self.ignored = weakref.WeakKeyDictionary()
        comm.before_exit(self.destroy)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(list(self.ignored))

    def destroy(self) -> None:
        """Destroy the mesh and its process groups, without any collective."""
        if not self.is_destroyed:
            self.is_destroyed = True
            destroy_mesh(self._meshes, list(self), self.in_group())
            self.ignored.clear()

    def in_group(self) -> bool:
        """Return whether the process group that the mesh was made from is there."""
        return dist.is_initialized() and not self._comm.closed


@final
class MeshStrategy(Strategy):
    """Parameters are DTensors on one mesh, sharded and replicated along its axes.

    With `fsdp`, every parameter is sharded over the dp_shard axis and gathered one unit at a time.
    With `tensor_parallel`, the weights of its plan are sharded over the tp axis; all other axes
    replicate the model, or shard it with `fsdp`. Where FSDP is off, FSDP2 with shards of one rank
    averages gradients over the replicas.
    """

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        name, dims = plan.strategy, plan.parallel_dims
        clear_mesh_caches()
        self._mesh = self._named_mesh = build_mesh(joined(dims), plan.device_type)
        if dims.cp > 1:
            self._named_mesh = build_mesh(dims, plan.device_type)
            rings = plan.parallelism is not None and plan.parallelism.cp_backend == RING
            self.context_parallel = ContextParallel(
                self._named_mesh[CP], ring_attention if rings else None
            )
        self._settings = read_settings(plan, self._mesh, comm, device, precision)
        self._models = MeshModels({id(m): m for m in (self._mesh, self._named_mesh)}.values(), comm)
        self._remap = ParameterRemap()
        self.sync: MeshSync = MeshSync(name)
        self.gradients: MeshGradients = MeshGradients(
            name, plan, comm, device, self._models, self._remap
        )
        self._gathers_fp8 = gathers_in_fp8(plan, self._settings.offloads)
        self.state = MeshState(dims, plan.plugin(FSDP), self._gathers_fp8, self._models)
        given = self._settings.tensor_parallel.torch_device_mesh
        if given is not None:
            check_given(given, self._mesh)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of the run; None after `close`."""
        return None if self._models.is_destroyed else self._named_mesh

    # -- preparing -------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[None]:
        """Return a context that initializes weights on rank 0 only, if the plugin says so.

        Other ranks build the model on the meta device. Afterwards, torch's generator has the state
        of rank 0 on all of them, as if all had drawn.
        """
        on_rank0 = self._settings.fsdp.cpu_ram_efficient_loading and self.comm.world_size > 1
        return self._init_on_rank0() if on_rank0 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _init_on_rank0(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.comm.rank == 0 else torch.device("meta"):
            yield
        synchronize_rng_states(["torch"])

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return `objects` wrapped for training; optimizers of earlier calls are remapped, too."""
        check_classes(objects.models, self._settings.fsdp.transformer_cls_names_to_wrap)
        done = super().prepare(objects, placement, prepared, evaluation)
        for optimizer in prepared.optimizers:
            self._keep_held(unwrap_optimizer(optimizer))
            self._remap.remap(optimizer)
        return done

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` distributed over the mesh, in place, unless it is already.

        For evaluation only, every rank holds the full model, with the weights of rank 0. Otherwise
        raise `ConfigError` if it is not to be moved to the device.
        """
        if isinstance(model, FSDPModule) or model in self._models.ignored:
            return model  # as after free_memory()
        if evaluation:
            return self._wrap_evaluated(model, place)
        if not place:
            raise ConfigError.of(
                f"prepare: device_placement=False for a model with {self.plan.strategy}",
                f"its parameters become DTensors on the mesh, which is on {self.device.type}",
                "Leave device_placement true for models, or offload: cpu_offload=True of fsdp.",
            )
        if self.context_parallel is not None:
            self.context_parallel.follow(model)
        if self.plan.parallel_dims.pp > 1:
            return self._wrap_stages(model)
        before = parameters_by_name(model)
        ignored = parallelize(model, self.plan.parallel_dims, self._settings)
        self._models.ignored[model] = ignored
        if self._gathers_fp8:
            scale_before_forwards(model)
        self._remap.record(before, parameters_by_name(model))
        self.gradients.know(model.parameters())
        return model

    def _wrap_stages(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` with this rank's stages alone, in a wrapper."""
        if any(pipelines(self._models)):
            value = f"prepare: a second model with pp_size={self.plan.parallel_dims.pp}"
            remedy = "Prepare one that is only evaluated with evaluation_mode=True."
            raise ConfigError.of(value, "the stages are those of one model", remedy)
        group = self._mesh[PP].get_group()
        gate = Gate(self.device, self._settings.formats.units.param_dtype)
        pipeline = Pipeline(model, self.plan.plugin(PIPELINE), group, gate)
        if self.context_parallel is not None:  # the last rank asks all other stages for shapes
            self.context_parallel.may_lack_attention = pipeline.rank != pipeline.last_rank
        wrapped = Pipelined(pipeline)
        before = parameters_by_name(model)
        ignored = parallelize_stages(pipeline, self.plan.parallel_dims, self._settings)
        after = parameters_by_name(model)
        self._remap.record({name: before[name] for name in after}, after)
        self._models.ignored[wrapped] = ignored
        for stage in pipeline.stages.values():
            self._models.ignored[stage] = []
        self.gradients.know(model.parameters())
        return wrapped

    def _wrap_evaluated(self, model: torch.nn.Module, place: bool) -> torch.nn.Module:
        weights = self._settings.initial_weights(self.device if place else torch.device("cpu"))
        weights.check(model)
        weights.materialize(model)
        return super().wrap_model(model, place, evaluation=True)

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer` over the shards that this rank holds."""
        own = unwrap_optimizer(optimizer)
        self._keep_held(own)
        self._remap.record_unsharded(unsharded_and_sharded(self._models))
        self._remap.remap(optimizer)
        self._check_kind(own)
        reshard_before_steps(own, self._models)
        check_first_step(own, self._mesh, self._models)
        step_by_mesh(own)
        if self._gathers_fp8:
            forget_after_steps(own, self._models)
        return super().wrap_optimizer(optimizer, place)

    def _keep_held(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step the parameters of this rank's stages alone."""
        for pipeline in pipelines(self._models):
            pipeline.keep_held(optimizer)

    def _check_kind(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose first step fails on DTensors."""
        kind = named_kind(optimizer, NO_DTENSOR)
        if kind is not None and any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
            raise ConfigError.of(
                f"prepare: {kind} with {self.plan.strategy}",
                "torch cannot compute its update on sharded weights (DTensor)",
                "Use AdamW or SGD, or train without sharding (DDP).",
            )
        quantized = quantized_kind(optimizer)
        if quantized is not None:
            raise ConfigError.of(
                f"prepare: {quantized} with {self.plan.strategy}",
                "it quantizes its state by blocks, which shards of weights would cut",
                "Use torch.optim.AdamW, whose state is sharded, or train without sharding (DDP).",
            )

    # -- the step --------------------------------------------------------------------------

    def forward_backward(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
        accumulation: Accumulation,
    ) -> list[torch.Tensor]:
        if not isinstance(model, Pipelined):
            return super().forward_backward(model, micro_batches, loss_fn, accumulation)
        placed = [self._place(one, accumulation.device_placement) for one in micro_batches]
        with accumulation.accumulate(model, sync_gradients=True):
            given = (model, placed, loss_fn, self._parts, accumulation)
            losses = model.pipeline.forward_backward(*given)
        if self.context_parallel is not None:  # stages know the shapes of the others by now
            self.context_parallel.may_lack_attention = True
        trained = [one for one in self._models.ignored[model] if one.requires_grad]
        average_gradients(trained, self._mesh)
        return losses

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients; average those of ignored modules where a model's are reduced."""
        for pipeline in pipelines(self._models):
            pipeline.backward(loss)
            return
        loss.backward(**kwargs)
        for model, parameters in self._models.ignored.items():
            if parameters and self.sync.reduces(model):
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                average_gradients(trained, self._mesh)

    def close(self) -> None:
        """Destroy the mesh and its process groups, once no rank has a collective under way."""
        if not self._models.is_destroyed and self._models.in_group():
            synchronize(self.device)
            self.comm.barrier()
        super().close()
        self._models.destroy()
