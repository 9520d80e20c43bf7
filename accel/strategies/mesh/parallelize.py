"""Distribute a model over a mesh, in place: one function per step, run as the dimensions say.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html,
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from accel.comm.ops import convert_to_fp32
from accel.config.checks import import_callable
from accel.config.fsdp import DTYPES, FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import TorchDynamoPlugin, is_compiling
from accel.machine.errors import ConfigError
from accel.plan.dims import TP, ParallelDims
from accel.precision.base import COMPUTE_DTYPES
from accel.strategies.base import refuse_copies
from accel.strategies.compile import compile_model
from accel.strategies.mesh.device_mesh import gradient_mesh
from accel.strategies.mesh.hooks import (
    SubmoduleCalls,
    fsdp_units,
    reshard_after_evaluation,
    train_what_requires_gradients,
)
from accel.strategies.mesh.parameters import InitialWeights
from accel.strategies.mesh.spec import FSDP, TENSOR_PARALLEL
from accel.strategies.mesh.tensor_parallel import apply_tensor_parallel
from accel.strategies.mesh.torch_internals import (
    buffer_table,
    checkpoint_activations,
)
from accel.strategies.mesh.units import (
    Modules,
    find_units,
    ignored_modules,
    parameters_of,
)

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision
    from accel.strategies.mesh.pipeline import Pipeline


@dataclass(frozen=True)
class MeshSettings:
    """Settings that models are parallelized by.

    Attributes:
        precision: autocast of forward passes.
        formats: mixed precision of FSDP2.
        fsdp: units, offloading and resharding.
        is_sharded: whether FSDP was requested; otherwise FSDP2 only averages gradients of replicas.
        tensor_parallel: tensor-parallel plan, where that was requested.
    """

    mesh: DeviceMesh
    device: torch.device
    comm: Communicator
    precision: Precision
    formats: Formats
    fsdp: FullyShardedDataParallelPlugin
    is_sharded: bool
    tensor_parallel: TorchTensorParallelPlugin
    dynamo: TorchDynamoPlugin

    @property
    def offload(self) -> OffloadPolicy:
        """Where parameters, gradients and optimizer state are kept."""
        given = self.fsdp.cpu_offload
        if isinstance(given, OffloadPolicy):
            return given
        if not getattr(given, "offload_params", given):
            return OffloadPolicy()
        # Pinned memory is of no use where the host computes.
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept in the host's memory."""
        return isinstance(self.offload, CPUOffloadPolicy)

    def initial_weights(self, device: torch.device) -> InitialWeights:
        """Return an object that materializes modules on `device`, as the plugin says."""
        import_callable(self.fsdp, "param_init_fn")
        sync = self.fsdp.sync_module_states is not False
        return InitialWeights(self.comm, device, self.fsdp.param_init_fn, sync)


def read_settings(
    plan: Plan, mesh: DeviceMesh, comm: Communicator, device: torch.device, precision: Precision
) -> MeshSettings:
    """Return the settings by the plugins of a plan.

    Without FSDP, replicas compute under autocast, and FSDP2 only averages their gradients.
    """
    fsdp: FullyShardedDataParallelPlugin | None = plan.plugin(FSDP)
    tensor_parallel: TorchTensorParallelPlugin | None = plan.plugin(TENSOR_PARALLEL)
    if fsdp is None:
        formats = build_formats(None, "no")
    else:
        formats = build_formats(fsdp.mixed_precision_policy, plan.mixed_precision)
    replicated = FullyShardedDataParallelPlugin(
        auto_wrap_policy="no_wrap", reshard_after_forward=False
    )
    return MeshSettings(
        mesh=mesh,
        device=device,
        comm=comm,
        precision=precision,
        formats=formats,
        fsdp=fsdp or replicated,
        is_sharded=fsdp is not None,
        tensor_parallel=tensor_parallel or TorchTensorParallelPlugin(),
        dynamo=plan.dynamo,
    )


def parallelize(
    model: torch.nn.Module, dims: ParallelDims, settings: MeshSettings
) -> list[torch.nn.Parameter]:
    """Replace the parameters of `model` by DTensors on the mesh, in place. Every rank calls this.

    On ranks other than 0, the model may be on the meta device. Return the parameters of ignored
    modules, whose gradients FSDP2 does not average. Raise `ConfigError` if the model does not fit
    the settings.
    """
    weights = settings.initial_weights(
        torch.device("cpu") if settings.offloads else settings.device
    )
    weights.check(model)
    ignored = ignored_modules(model, settings.fsdp.ignored_modules)
    settings.precision.convert(model, gathers=settings.is_sharded, keep=ignored)
    units = find_units(model, settings.fsdp, set(parameters_of(ignored)))
    # First of all: its hooks recompute a unit from the inputs that the hooks of other steps change.
    checkpoint_units(units, settings)
    if dims.tp > 1 or not settings.is_sharded:
        weights.materialize(model)
        model.to(settings.device)
    if dims.tp > 1:
        apply_tensor_parallel(model, settings.mesh[TP], settings.tensor_parallel.tp_plan)
    # Under FSDP, its policy decides on the dtype of outputs, in a hook around the forward pass.
    settings.precision.wrap_forward(model, outputs_in_fp32=not settings.is_sharded)
    if settings.is_sharded or dims.grad_size > 1:
        shard_or_replicate(model, units, ignored, weights, settings)
        install_hooks(model, settings)
    compile_model(model, settings.dynamo, hooks_inside=True)  # in place, between hooks
    return parameters_of(ignored)


def parallelize_stages(
    pipeline: Pipeline, dims: ParallelDims, settings: MeshSettings
) -> list[torch.nn.Parameter]:
    """Do what `parallelize` does for the stages of a model that this rank holds."""
    model, formats, fsdp = pipeline.model, settings.formats, settings.fsdp
    weights = settings.initial_weights(settings.device)
    weights.check(model)
    settings.precision.convert(model, gathers=settings.is_sharded)
    pipeline.take(weights.materialize, settings.device)
    if dims.tp > 1:
        apply_tensor_parallel(model, settings.mesh[TP], settings.tensor_parallel.tp_plan)
    settings.precision.wrap_forward(model, outputs_in_fp32=not settings.is_sharded)
    if formats.root.output_dtype == torch.float32:
        model.register_forward_hook(lambda *call: convert_to_fp32(call[-1]))
    if fsdp.given("reshard_after_forward") is None:  # else each micro-batch gathers them again
        fsdp = fsdp.with_given(reshard_after_forward=False)
    # Stages exchange activations in the dtype of computation.
    formats = dataclasses.replace(formats, root=formats.units)
    settings = dataclasses.replace(settings, fsdp=fsdp, formats=formats)
    # Weights that are in one stage alone are sharded with it.
    uses = Counter(id(p) for stage in pipeline.stages.values() for p in stage.parameters())
    replicated = [parameter for parameter in model.parameters() if uses[id(parameter)] != 1]
    ignored: Modules = [torch.nn.ParameterList(replicated)]
    for stage in pipeline.stages.values():
        units = find_units(stage, fsdp, set(replicated))
        checkpoint_units(units, settings)
        if settings.is_sharded or dims.grad_size > 1:
            shard_or_replicate(stage, units, ignored, weights, settings)
            reshard_after_evaluation(stage)
            train_what_requires_gradients(stage)
            refuse_copies(fsdp_units(stage))
    refuse_copies([model])
    return replicated


def checkpoint_units(units: Modules, settings: MeshSettings) -> None:
    """Let the backward pass recompute the activations of each unit, if that is requested."""
    if not settings.fsdp.activation_checkpointing:
        return
    if not units:
        raise ConfigError.of(
            "activation_checkpointing=True with a model of one unit",
            "activations are recomputed one unit at a time",
            "Name the classes of blocks in transformer_cls_names_to_wrap.",
        )
    for unit in units:
        checkpoint_activations(unit)


def shard_or_replicate(
    model: torch.nn.Module,
    units: Modules,
    ignored: Modules,
    weights: InitialWeights,
    settings: MeshSettings,
) -> None:
    """Shard and replicate `model` over the data-parallel axes of the mesh, unit by unit.

    Args:
        model: after tensor parallelism.
        units: modules inside that are gathered one at a time, inner ones first.
        ignored: modules that are replicated on every rank.
    """
    mesh, formats = gradient_mesh(settings.mesh), settings.formats
    reshard = settings.fsdp.given("reshard_after_forward")
    for unit in [*units, model]:
        weights.materialize(unit)
        cast_buffers(unit, formats.buffers)
        fully_shard(
            unit,
            mesh=mesh,
            # torch would infer None in the first forward pass, which may be within `no_sync`.
            reshard_after_forward=unit is not model if reshard is None else reshard,
            mp_policy=formats.root if unit is model else formats.units,
            offload_policy=settings.offload,
            ignored_params=set(parameters_of(ignored)) or None,
        )
    for module in ignored:  # also where other parameters are offloaded
        module.to(settings.device)
    if settings.fsdp.forward_prefetch:
        prefetch_forward(units)


def prefetch_forward(units: Modules) -> None:
    """Let each unit all-gather the next while it computes; `units` come inner and last first."""
    forward = [unit for unit in reversed(units) if isinstance(unit, FSDPModule)]
    for unit, following in itertools.pairwise(forward):
        unit.set_modules_to_forward_prefetch([following])


def install_hooks(model: torch.nn.Module, settings: MeshSettings) -> None:
    """Install the hooks that FSDP2 lacks: resharding, freezing, and calls of submodules."""
    reshard_after_evaluation(model)
    train_what_requires_gradients(model)
    dynamo = settings.dynamo
    if not is_compiling(dynamo) or dynamo.use_regional_compilation is not False:
        SubmoduleCalls(model)  # hooks of its modules would break the one graph of the model
    refuse_copies(fsdp_units(model))


DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class Formats:
    """Policies of the units inside a model and of its root, whose outputs the user sees.

    `buffers` is the dtype of floating-point buffers; None: unchanged.
    """

    units: MixedPrecisionPolicy
    root: MixedPrecisionPolicy
    buffers: torch.dtype | None = None


def build_formats(given: object, mixed_precision: str) -> Formats:
    """Return the policies `given` in the plugin, or else those of the run's precision.

    Under a precision, parameters are gathered and multiplied in it, gradients are reduced in fp32,
    and the model returns fp32. The same holds for fields that a policy without param_dtype omits.
    """
    standard = _standard(COMPUTE_DTYPES.get(mixed_precision))
    if given is None:
        return standard
    if isinstance(given, str):
        return _standard(_dtype(given))
    if isinstance(given, MixedPrecisionPolicy):
        formats = Formats(given, given)
    else:
        formats = _from_fields(given)
    root = formats.root
    if root.param_dtype is None:
        omitted = {n: getattr(standard.root, n) for n in DTYPE_FIELDS if getattr(root, n) is None}
        root = dataclasses.replace(root, **omitted)
    # Between units, activations stay in the dtype of computation.
    units = dataclasses.replace(
        root, output_dtype=None, cast_forward_inputs=formats.units.cast_forward_inputs
    )
    return Formats(units, root, formats.buffers)


def _standard(dtype: torch.dtype | None) -> Formats:
    if dtype is None or dtype == torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        return Formats(policy, policy)
    units = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    return Formats(units, root)


def _from_fields(given: object) -> Formats:
    """Return the policies of a dict, or of the older wrapper's `MixedPrecision`."""
    fields = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    dtypes = {name: _dtype(fields.get(name)) for name in DTYPE_FIELDS}
    inner = fields.get("cast_forward_inputs")
    inner = True if inner is None else inner
    outer = fields.get("cast_root_forward_inputs")
    outer = inner if outer is None else outer
    units = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=inner)
    root = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=outer)
    return Formats(units, root, _dtype(fields.get("buffer_dtype")))


def _dtype(value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    name = DTYPES[str(value).removeprefix("torch.").lower()]
    return None if name is None else getattr(torch, name)


def cast_buffers(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Cast floating-point buffers of `model` to `dtype`; None: they are not cast."""
    if dtype is None:
        return
    for module in model.modules():
        buffers = buffer_table(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_floating_point():
                buffers[name] = buffer.to(dtype)
