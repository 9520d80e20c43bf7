"""What backends share whose parameters are DTensors: every process holds a part of each tensor.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakIdKeyDictionary

from accel.checkpoint.optimizers import ParameterNames, load_by_name, parameters
from accel.data.base import data_rank
from accel.errors import ConfigError, Problem
from accel.objects import Objects
from accel.optimizer import unwrap_optimizer
from accel.strategies.base import Strategy
from accel.strategies.mesh import SHARD, TENSOR

# -- tensors -------------------------------------------------------------------------------


def whole(value: Any) -> Any:
    """Return a tensor whole and in the host's memory; other values as they are.

    Collective for a DTensor: every rank of its mesh calls it.
    """
    if not isinstance(value, DTensor):
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value
    mesh, local = value.device_mesh, _local(value)
    if local.device.type != mesh.device_type:  # offloaded: the mesh talks on its own device
        value = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return cast("DTensor", value.detach()).full_tensor().cpu()


def _local(value: DTensor) -> torch.Tensor:
    return value.to_local().detach()


def part_like(value: torch.Tensor, target: DTensor) -> DTensor:
    """Return this rank's part of a whole tensor, split and placed as `target`; no communication.

    Args:
        value: [...] of the shape of `target`; its dtype is kept.
        target: gives mesh, placements and device.
    """
    mesh, placements = target.device_mesh, target.placements
    sizes, offsets = compute_local_shape_and_global_offset(target.shape, mesh, placements)
    mine = value.detach()
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        mine = mine.narrow(dim, min(offset, mine.shape[dim]), size)
    mine = mine.to(target.to_local().device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def _fitted(value: Any, target: torch.Tensor | None) -> Any:
    """Return `value` as a part where it is of the shape of a `target` that is split."""
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor):
        return value
    split = not isinstance(value, DTensor) and value.shape == target.shape and value.dim() > 0
    return part_like(value, target) if split else value


def gradient_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm [] of all gradients, each element counted once over all ranks.

    Args:
        gradients: DTensors and plain tensors (which are the same on all ranks that share a mesh).
        norm_type: order of the norm; infinity for the largest magnitude.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        key: Any = None
        local = gradient
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = _summed(gradient)
            split = [not p.is_replicate() for p in gradient.placements]
            axes = tuple(axis for axis, is_split in enumerate(split) if is_split)
            key, local = (gradient.device_mesh, axes), gradient.to_local()
        kinds.setdefault(key, []).append(local)
    norms = [_reduced_norm(key, locals_, norm_type) for key, locals_ in kinds.items()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _summed(gradient: DTensor) -> DTensor:
    """Return a gradient of which ranks hold summands as one that each of them holds."""
    final = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=final)


def _reduced_norm(key: Any, tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    device = torch.device(key[0].device_type) if key else tensors[0].device
    norm = torch.zeros((), device=device)
    if present:
        norm = torch.nn.utils.get_total_norm(present, norm_type).to(device)
    if key is None:
        return norm
    mesh, axes = key
    largest = math.isinf(norm_type)
    power = norm if largest else norm**norm_type
    for axis in axes:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(power, op=op, group=mesh.get_group(axis))
    return power if largest else power ** (1.0 / norm_type)


# -- parameters ----------------------------------------------------------------------------


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by name, under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))


class Successors:
    """Which parameter took the place of which, so that optimizers follow."""

    def __init__(self) -> None:
        self._new: Any = WeakIdKeyDictionary()

    def record(
        self, before: dict[str, torch.nn.Parameter], after: dict[str, torch.nn.Parameter]
    ) -> None:
        """Remember what a model's parameters became.

        Args:
            before: by name.
            after: by name.

        Raises:
            ConfigError: if names that shared a parameter do not share one any more.
        """
        for name, old in before.items():
            if old is not after[name]:
                known = self._new.setdefault(old, after[name])
                if known is not after[name]:
                    raise ConfigError(_untied(before, old))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` train the successors of its parameters, with the state it has.

        Args:
            optimizer: prepared or not.
        """
        own = unwrap_optimizer(optimizer)
        for group in own.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._new.get(old)
                if new is None:
                    continue
                group["params"][index] = new
                if old in own.state:
                    state = own.state.pop(old)
                    own.state[new] = {k: _fitted(v, new) for k, v in state.items()}


def _untied(before: dict[str, torch.nn.Parameter], shared: torch.nn.Parameter) -> Problem:
    names = [name for name, parameter in before.items() if parameter is shared]
    return Problem(
        f"prepare: the parameter shared by {', '.join(names)}",
        "all its uses are split alike and gathered together",
        "Give all of them the same style in the plan, or none.",
    )


def _mixed_groups(optimizer: torch.optim.Optimizer) -> list[Problem]:
    """Return the groups that take parameters of several meshes, or of none, in one call."""
    problems = []
    for index, group in enumerate(optimizer.param_groups):
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        for switch in ("foreach", "fused"):
            if group.get(switch) and len(meshes) > 1:
                value = f"prepare: {switch}=True of group {index} of {type(optimizer).__name__}"
                rule = "some of its parameters are split and others are whole"
                problems.append(Problem(value, rule, f"Leave {switch} out."))
    return problems


# -- the strategy --------------------------------------------------------------------------


class DTensorStrategy(Strategy):
    """Base of backends that replace parameters by DTensors on one `DeviceMesh`; no backend itself.

    They build `_mesh` and implement `wrap_model`, which records what replaced what.
    """

    _mesh: DeviceMesh | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._successors = Successors()
        self._unsynced: Counter[int] = Counter()

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of the run."""
        return self._mesh

    @property
    def data_rank(self) -> tuple[int, int]:
        """(index, count) of the data shard this process reads; ranks of one replica share it."""
        if self._mesh is None:
            return super().data_rank
        count, index = data_rank(None, self._mesh)  # type: ignore[arg-type]
        return index, count

    @property
    def sharded(self) -> tuple[str, ...]:
        """What lies in parts on several processes, in words for people."""
        mesh = self._mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        sizes = [
            mesh[name].size() for name in (SHARD, TENSOR) if mesh is not None and name in names
        ]
        return ("parameters", "gradients", "optimizer state") if max(sizes, default=1) > 1 else ()

    def prepare(
        self,
        objects: Objects,
        placement: Objects,
        prepared: Objects,
        evaluation: bool = False,
        slice_fn: Any | None = None,
    ) -> Objects:
        """Return `objects` wrapped; optimizers of earlier calls follow their parameters."""
        done = super().prepare(objects, placement, prepared, evaluation, slice_fn)
        for optimizer in prepared.optimizers:
            self._successors.follow(optimizer)
        return done

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer` over the parts that this rank holds.

        Raises:
            ConfigError: if it treats whole and split tensors in one call, which torch cannot.
        """
        self._successors.follow(optimizer)
        ConfigError.raise_if(_mixed_groups(unwrap_optimizer(optimizer)))
        return super().wrap_optimizer(optimizer, place)

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module, its parameters in parts (an evaluation may leave them)."""
        own = super().unwrap_model(model)
        for module in own.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return own

    # -- the step --------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Exchange no gradients in backward passes inside, and keep parameters gathered."""
        if not isinstance(model, FSDPModule):
            yield
            return
        self._unsynced[id(model)] += 1
        _set_sync(model, False)
        try:
            yield
        finally:
            self._unsynced[id(model)] -= 1
            _set_sync(model, self._unsynced[id(model)] <= 0)

    @contextlib.contextmanager
    def trigger_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Exchange all gradients so far in the next backward, after forwards in `no_sync`."""
        if not isinstance(model, FSDPModule):
            yield
            return
        _set_sync(model, True)
        try:
            yield
        finally:
            _set_sync(model, self._unsynced[id(model)] <= 0)

    def join(self, joinables: Sequence[Any], **kwargs: Any) -> AbstractContextManager[None]:
        """Refuse: every process takes part in gathering parameters.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            Problem(
                f"join_uneven_inputs with {self.traits.name}",
                "each forward pass gathers parameters from all processes",
                "Let loaders complete the last batch: even_batches=True.",
            )
        )

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`; return the norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        norm = gradient_norm(gradients, float(norm_type))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.detach().mul_(factor.to(local.device))
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse where gradients are in parts.

        Raises:
            ConfigError: if any parameter is sharded.
        """
        entries = list(parameters)
        if any(isinstance(parameter, DTensor) for parameter in entries):
            raise ConfigError(
                Problem(
                    f"clip_grad_value_ with {self.traits.name}",
                    "the engines that shard gradients clip by their norm alone",
                    "Call clip_grad_norm_(parameters, max_norm).",
                )
            )
        super().clip_grad_value_(entries, clip_value)

    # -- state -----------------------------------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors by name, in the host's memory, on all ranks."""
        state = self.unwrap_model(model).state_dict(keep_vars=True)
        gathered: dict[int, torch.Tensor] = {}
        for value in state.values():  # one tensor under two names is gathered once
            if id(value) not in gathered:
                gathered[id(value)] = whole(value)
        return {name: gathered[id(value)] for name, value in state.items()}

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        """Load what `model_state` returned, from any backend and world size."""
        own = self.unwrap_model(model)
        targets = own.state_dict()
        parts = {name: _fitted_exactly(value, targets.get(name)) for name, value in state.items()}
        own.load_state_dict(parts, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, in whole tensors. Called on every rank."""
        saved = super().optimizer_state(optimizer, names)
        kinds = ("state", "other_state", "extra")
        return saved | {kind: _all_whole(saved[kind]) for kind in kinds}

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        """Load what `optimizer_state` returned, from any backend and world size."""
        own = unwrap_optimizer(optimizer)
        live = dict(zip(names.keys(own), parameters(own), strict=True))
        parts = {
            key: _parts(entry, live.get(names.canonical(key)))
            for key, entry in state.get("state", {}).items()
        }
        load_by_name(own, state | {"state": parts}, names)

    def release(self) -> None:
        """Let go of the mesh, after what is under way."""
        super().release()
        self._mesh = None


def _set_sync(model: FSDPModule, sync: bool) -> None:
    model.set_requires_gradient_sync(sync)
    model.set_reshard_after_backward(sync)


def _fitted_exactly(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Return the part of a whole weight; of another shape it stays, for torch to name it."""
    if isinstance(target, DTensor) and value.shape == target.shape:
        return part_like(value, target)
    return value


def _all_whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _all_whole(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_all_whole(entry) for entry in value)
    return whole(value)


def _parts(entry: Any, target: torch.Tensor | None) -> Any:
    if not isinstance(entry, dict):
        return _fitted(entry, target)
    return {name: _fitted(value, target) for name, value in entry.items()}
