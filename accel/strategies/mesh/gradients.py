"""Gradients of models whose parameters are DTensors: scaled, averaged, clipped, stepped.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from accel.comm.base import by_dtype, exchange_flat
from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError, unknown_choice
from accel.machine.memory import local
from accel.plan.dims import gradient_axes
from accel.precision.amp import StepScaler, parameters_of
from accel.state import PartialState
from accel.strategies.base import Gradients, Sync
from accel.strategies.mesh.parameters import ParameterRemap
from accel.strategies.mesh.pipeline import pipelines
from accel.strategies.mesh.torch_internals import (
    Models,
    Resharding,
    any_unsharded,
    gradient_values,
    keep_unsharded,
    restore_resharding,
    unreduced_gradients,
    unscale,
    unsharded_and_sharded,
)

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan


# A mesh and the axes of it that gradients are sharded over, or the device of plain tensors.
Layout = tuple[DeviceMesh, tuple[int, ...]] | torch.device


class MeshGradients(Gradients):
    """Gradient scaling and clipping, and the parameters that optimizers step.

    `models` are the distributed models at each call.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        comm: Communicator,
        device: torch.device,
        models: Models,
        remap: ParameterRemap,
    ) -> None:
        scaler = None
        if plan.mixed_precision == "fp16":
            scaler = ShardedStepScaler(plan.device_type, comm, models, **plan.scaler.to_kwargs())
        super().__init__(scaler)
        self._name = name
        self._comm = comm
        self._device = device
        self._models = models
        self._remap = remap
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of prepared models

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let optimizers take `parameters` in `add_param_group`: those of a prepared model."""
        self._known.update((parameter, True) for parameter in parameters)

    def stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of `parameters`, which a forward pass may have gathered."""
        if any_unsharded(self._models):
            self._remap.record_unsharded(unsharded_and_sharded(self._models))
        return [self._remap.current(parameter) for parameter in parameters]

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        own = self.stepped(parameters)
        new = sum(parameter not in self._known for parameter in own)
        if new and self._comm.world_size > 1:
            raise ConfigError.of(
                f"add_param_group: {new} parameters that no model had at prepare",
                f"{self._name} distributes parameters at prepare: gradients of later ones are "
                "not averaged over the ranks",
                "Add the layers before prepare, frozen if need be: requires_grad_(True) works "
                "at any time.",
            )
        return own

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale shards of gradients to a total norm over all ranks of at most `max_norm`."""
        own = self.stepped(parameters)
        trained = [p for p in own if p.requires_grad or p.grad is not None]
        norm = self._norm(trained, float(norm_type))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in (p.grad for p in trained if p.grad is not None):
            shard = local(gradient).detach()
            shard.mul_(factor.to(shard.device))
        return norm

    def _norm(self, trained: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        pipeline = next(pipelines(self._models), None)
        twice = set() if pipeline is None else pipeline.counted_elsewhere()
        own = [parameter for parameter in trained if id(parameter) not in twice]
        zero = torch.zeros((), device=self._device)
        norm = gradient_norm(own, norm_type) if own else zero
        return norm if pipeline is None else _over_ranks(norm, norm_type, [pipeline.group])

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse sharded gradients."""
        entries = list(parameters)
        if any(isinstance(parameter, DTensor) for parameter in entries):
            raise ConfigError.of(
                f"clip_grad_value_ with {self._name}",
                "sharded gradients support clipping by norm only",
                "Call clip_grad_norm_(parameters, max_norm).",
            )
        super().clip_value(entries, clip_value)


def gradient_norm(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm [] of all gradients, each element counted once over all ranks.

    It is in fp32, or fp64 where parameters are. A rank without a gradient takes part: others wait
    for it. `parameters`, at least one, are DTensors and plain tensors (which are the same on all
    ranks that share a mesh).
    """
    groups: dict[Layout, list[torch.Tensor]] = {}
    # Ranks reduce in one dtype, also those that hold no element of some tensor.
    dtypes = (parameter.dtype.to_real() for parameter in parameters)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            gradient = _reduced(gradient)
        placed = parameter if gradient is None else gradient
        layout = _layout(placed) if isinstance(placed, DTensor) else parameter.device
        found = groups.setdefault(layout, [])
        if gradient is not None:
            found.append(local(gradient))
    norms = [_reduced_norm(layout, found, norm_type, dtype) for layout, found in groups.items()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _layout(tensor: DTensor) -> Layout:
    axes = [axis for axis, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    return tensor.device_mesh, tuple(axes)


def _reduced(gradient: DTensor) -> DTensor:
    final = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=final)


def _reduced_norm(
    layout: Layout, tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    device = layout if isinstance(layout, torch.device) else torch.device(layout[0].device_type)
    norm = torch.zeros((), device=device, dtype=dtype)
    if present:
        norm = torch.nn.utils.get_total_norm(present, norm_type).to(device, dtype)
    if isinstance(layout, torch.device):
        return norm
    mesh, axes = layout
    return _over_ranks(norm, norm_type, [mesh.get_group(axis) for axis in axes])


def _over_ranks(
    norm: torch.Tensor, norm_type: float, groups: Iterable[dist.ProcessGroup]
) -> torch.Tensor:
    """Return the norm [] of what the ranks of `groups` have, each a part."""
    largest = math.isinf(norm_type)
    power = norm.clone() if largest else norm**norm_type
    for group in groups:
        dist.all_reduce(power, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return power if largest else power ** (1.0 / norm_type)


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Average the gradients of `parameters` over the data-parallel ranks, in place.

    They are replicated there. A gradient that was averaged before, and added to since, is averaged
    correctly, too. Every rank calls this with the same parameters; a gradient that is missing on
    some ranks counts as zeros.
    """
    names = gradient_axes(mesh.mesh_dim_names or ())
    groups = [mesh.get_group(name) for name in names if mesh[name].size() > 1]
    if not groups:
        return

    def average(bucket: torch.Tensor) -> torch.Tensor:
        for group in groups:
            bucket /= group.size()  # first: a sum may overflow in fp16
            dist.all_reduce(bucket, group=group)
        return bucket

    for indices in by_dtype(parameters):
        same = [parameters[index] for index in indices]
        missing = [index for index, parameter in enumerate(same) if parameter.grad is None]
        for index in missing:
            same[index].grad = torch.zeros_like(same[index])
        own = [local(parameter.grad) for parameter in same if parameter.grad is not None]
        # Which ranks have a gradient is reduced, too: where none has, it stays missing.
        has = own[0].new_ones(len(same))
        for index in missing:
            has[index] = 0
        *averaged, found = exchange_flat([*own, has], average)
        for gradient, result in zip(own, averaged, strict=True):
            gradient.copy_(result[0])
        for index in missing:  # only here does the host wait for the device
            if not found[0, index]:
                same[index].grad = None


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


class MeshSync(Sync):
    """Gradient synchronization of FSDP units."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsynced: Counter[int] = Counter()  # by id of a model: `no_sync` contexts around
        self._resharding: dict[int, Resharding] = {}  # by id of a model that does not synchronize

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce no gradients in backward passes inside, and keep parameters gathered."""
        self._unsynced[id(model)] += 1
        self._set(model, False)
        try:
            yield
        finally:
            self._unsynced[id(model)] -= 1
            self._set(model, self._unsynced[id(model)] <= 0)

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce all accumulated gradients in the next backward, after forwards in `no_sync`."""
        self._set(model, True)
        try:
            yield
        finally:
            self._set(model, self._unsynced[id(model)] <= 0)

    def reduces(self, model: torch.nn.Module) -> bool:
        """Return whether backward passes through `model` reduce gradients now."""
        return id(model) not in self._resharding

    def _set(self, model: torch.nn.Module, sync: bool) -> None:
        if not isinstance(model, FSDPModule):
            return
        model.set_requires_gradient_sync(sync)
        model.set_reshard_after_backward(sync)
        if sync:
            restore_resharding(self._resharding.pop(id(model), []))
        elif id(model) not in self._resharding:
            self._resharding[id(model)] = keep_unsharded(model)

    def join(self, joinables: Sequence[object]) -> NoReturn:
        """Refuse: every rank takes part in each all-gather."""
        raise ConfigError.of(
            f"join_uneven_inputs with {self._name}",
            "each forward pass gathers parameters from all ranks",
            "Let loaders complete the last batch: even_batches=True.",
        )
