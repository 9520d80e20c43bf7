"""What backends share whose parameters are DTensors: every process holds a part of each tensor.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, parameters
from accel.device import synchronize
from accel.errors import ConfigError, Problem
from accel.memory_estimate import local
from accel.optimizer import unwrap_optimizer
from accel.prepared import Objects
from accel.strategies.base import Gradients, StateIO, Strategy, Sync
from accel.strategies.compile import compile_model, is_on
from accel.strategies.deepcopies import WHOLE_AVERAGE, refuse_copies
from accel.strategies.mesh.device_mesh import build_mesh
from accel.strategies.mesh.foreach_by_mesh import step_by_mesh
from accel.strategies.mesh.full_tensors import all_whole, fitted_weight, parts_of, whole
from accel.strategies.mesh.grad_norm import gradient_norm
from accel.strategies.mesh.grad_scaler import ShardedStepScaler
from accel.strategies.mesh.inner_calls import InnerCalls
from accel.strategies.mesh.parameter_remap import Successors, by_name
from accel.strategies.mesh.resharding import (
    any_gathered,
    copies_and_shards,
    keep_requires_grad,
    reshard,
    reshard_after_evaluation,
    reshard_before_steps,
    train_after_inference,
)
from accel.strategies.mesh.teardown import leave, units_of
from accel.strategies.mesh.tp_gradients import check_first_step
from accel.strategies.mesh.unfrozen_units import reduce_what_is_unfrozen
from accel.strategies.optimizer_kinds import fails_on_shards

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision

SHARDED_AVERAGE = (
    f"{WHOLE_AVERAGE} Or keep it in shards: prepare the copy beside the model, prepare(model, copy,"
    " optimizer), and update its parameters from the model's, one by one."
)


class ShardedModels:
    """The models that a strategy distributes, and their parameters before and after.

    Attributes:
        remap: finds the sharded parameter that took the place of a given one.
    """

    def __init__(self) -> None:
        self.remap = Successors()
        self._known: Any = WeakIdKeyDictionary()  # parameters of models that were prepared
        self._models: list[weakref.ref[torch.nn.Module]] = []

    def __call__(self) -> list[torch.nn.Module]:
        """Return the models that are distributed, and still referenced."""
        return [model for reference in self._models if (model := reference()) is not None]

    def __contains__(self, model: torch.nn.Module) -> bool:
        return any(known() is model for known in self._models)

    def add(self, model: torch.nn.Module, before: dict[str, torch.nn.Parameter]) -> None:
        """Record a model that was just distributed, and its parameters by name before that."""
        self._models.append(weakref.ref(model))
        self.remap.record(before, by_name(model))
        self._known.update((parameter, True) for parameter in model.parameters())

    def clear(self) -> None:
        """Forget the models."""
        self._models.clear()

    def names(self) -> dict[int, str]:
        """Return the names of the parameters of all models, by their id."""
        return {id(p): name for model in self() for name, p in model.named_parameters()}

    def shards(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of `parameters`, which a forward pass may have left gathered."""
        if any_gathered(self()):
            self.remap.record_copies(copies_and_shards(self()))
        return [self.remap.current(parameter) for parameter in parameters]

    def num_unknown(self, shards: Iterable[torch.Tensor]) -> int:
        """Return how many of `shards` belong to no model that was prepared."""
        return sum(shard not in self._known for shard in shards)


class MeshSync(Sync):
    """Gradients are reduced unit by unit; in `no_sync`, parameters stay gathered.

    Args:
        name: of the strategy, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsynced: Counter[int] = Counter()
        # By id of a model that exchanges nothing now: what its units are resharded to otherwise.
        self._resharding: dict[int, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce no gradients in backward passes inside, and keep parameters gathered."""
        if not isinstance(model, FSDPModule):
            yield
            return
        self._unsynced[id(model)] += 1
        self._set_sync(model, False)
        try:
            yield
        finally:
            self._unsynced[id(model)] -= 1
            self._set_sync(model, self._unsynced[id(model)] <= 0)

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce all gradients so far in the next backward, after forwards in `no_sync`."""
        if not isinstance(model, FSDPModule):
            yield
            return
        self._set_sync(model, True)
        try:
            yield
        finally:
            self._set_sync(model, self._unsynced[id(model)] <= 0)

    def reduces(self, model: torch.nn.Module) -> bool:
        """Return whether backward passes through `model` reduce gradients now."""
        return id(model) not in self._resharding

    def _set_sync(self, model: Any, sync: bool) -> None:
        model.set_requires_gradient_sync(sync)
        model.set_reshard_after_backward(sync)
        if sync:
            for unit, mesh_info in self._resharding.pop(id(model), ()):
                unit.post_forward_mesh_info = mesh_info
        elif self.reduces(model):
            # torch's `set_reshard_after_forward` cannot bring back a group of so many processes.
            own = [(unit, unit.post_forward_mesh_info) for unit in units_of(model)]
            self._resharding[id(model)] = own
            for unit, _ in own:
                unit.post_forward_mesh_info = None

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[None]:
        """Refuse: every rank takes part in gathering parameters.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            Problem(
                f"join_uneven_inputs with {self._name}",
                "each forward pass gathers parameters from all processes",
                "Let loaders complete the last batch: even_batches=True.",
            )
        )


class MeshGradients(Gradients):
    """Gradients are DTensors, each rank holding its shards.

    Args:
        name: of the strategy, for messages.
        comm: how processes talk.
        device: where this process computes.
        models: those that are distributed.
        scaler: scales losses under fp16, or None.
    """

    def __init__(
        self,
        name: str,
        comm: Communicator,
        device: torch.device,
        models: ShardedModels,
        scaler: ShardedStepScaler | None,
    ) -> None:
        super().__init__(scaler)
        self._name = name
        self._comm = comm
        self._device = device
        self._models = models

    def stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of `parameters`, which a forward pass may have left gathered."""
        return self._models.shards(parameters)

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of parameters that are added to an optimizer.

        Raises:
            ConfigError: if they came into a model after it was prepared.
        """
        own = self.stepped(parameters)
        new = self._models.num_unknown(own)
        if new and self._comm.world_size > 1:
            raise ConfigError(
                Problem(
                    f"add_param_group: {new} parameters that no model had at prepare",
                    f"{self._name} distributes parameters at prepare: others would be "
                    "trained by each rank for itself",
                    "Add the layers before prepare, frozen if need be: requires_grad_(True) works "
                    "at any time.",
                )
            )
        return own

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`; return the norm [] before."""
        own = self.stepped(parameters)
        trained = [p for p in own if p.requires_grad or p.grad is not None]
        if not trained:
            return torch.zeros((), device=self._device)
        norm = gradient_norm(trained, float(norm_type))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in (p.grad for p in trained if p.grad is not None):
            part = local(gradient).detach()
            part.mul_(factor.to(part.device))
        return norm

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse where gradients are sharded.

        Raises:
            ConfigError: if any parameter is sharded.
        """
        entries = list(parameters)
        if any(isinstance(parameter, DTensor) for parameter in entries):
            raise ConfigError(
                Problem(
                    f"clip_grad_value_ with {self._name}",
                    "sharded gradients support clipping by norm only",
                    "Call clip_grad_norm_(parameters, max_norm).",
                )
            )
        super().clip_value(entries, clip_value)


class MeshState(StateIO):
    """Full state dicts are gathered from the shards of all ranks.

    Args:
        sharded: names of sharded state, for the run header.
    """

    def __init__(self, sharded: tuple[str, ...]) -> None:
        self._sharded = sharded

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module, its parameters sharded (a forward may leave copies)."""
        own = super().unwrap(model)
        reshard(own)
        return own

    @property
    def sharded(self) -> tuple[str, ...]:
        """Names of sharded state."""
        return self._sharded

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by name, in the host's memory, on all ranks."""
        state = self.unwrap(model).state_dict(keep_vars=True)
        gathered: dict[int, torch.Tensor] = {}
        for value in state.values():  # tied weights are gathered once
            if id(value) not in gathered:
                gathered[id(value)] = whole(value)
        return {name: gathered[id(value)] for name, value in state.items()}

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        """Load what `model_state` returned, from any strategy and world size."""
        own = self.unwrap(model)
        targets = own.state_dict()
        parts = {name: fitted_weight(value, targets.get(name)) for name, value in state.items()}
        own.load_state_dict(parts, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, in full tensors."""
        saved = super().optimizer_state(optimizer, names)
        kinds = ("state", "other_state", "extra")
        return saved | {kind: all_whole(saved[kind]) for kind in kinds}

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        """Load what `optimizer_state` returned, from any strategy and world size."""
        own = unwrap_optimizer(optimizer)
        live = dict(zip(names.keys(own), parameters(own), strict=True))
        parts = {
            key: parts_of(entry, live.get(names.canonical(key)))
            for key, entry in state.get("state", {}).items()
        }
        load_by_name(own, state | {"state": parts}, names)


class DTensorStrategy(Strategy):
    """Base of backends that replace parameters by DTensors on one `DeviceMesh`; no backend itself.

    They implement `parallelize`.
    """

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        name = self.plan.strategy
        self._mesh: DeviceMesh | None = build_mesh(plan)
        self._models = ShardedModels()
        self.sync: MeshSync = MeshSync(name)
        scaler = sharded_scaler(plan, comm, self._models)
        self.gradients = MeshGradients(name, comm, device, self._models, scaler)
        self.state = MeshState(self.sharded_names())
        comm.before_exit(self._let_go)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of the run."""
        return self._mesh

    def sharded_names(self) -> tuple[str, ...]:
        """Return the names of sharded state, for the run header."""
        dims = self.plan.parallel_dims
        sharded = max(dims.dp_shard, dims.tp) > 1
        return ("parameters", "gradients", "optimizer state") if sharded else ()

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return `objects` wrapped; optimizers of earlier calls follow their parameters."""
        done = super().prepare(objects, placement, prepared, evaluation)
        for optimizer in prepared.optimizers:
            self._models.remap.follow(optimizer)
        return done

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` with its parameters sharded, unless they are already."""
        if isinstance(model, FSDPModule) or model in self._models:
            return model  # as after free_memory()
        before = by_name(model)
        self.parallelize(model)
        self._models.add(model, before)
        if isinstance(model, FSDPModule):
            reshard_after_evaluation(model)
            train_after_inference(model)
            dynamo = self.plan.dynamo
            if not is_on(dynamo) or dynamo.use_regional_compilation is not False:
                InnerCalls(model)  # hooks of its modules would break one graph of all
                reduce_what_is_unfrozen(model)
            units = (module for module in model.modules() if isinstance(module, FSDPModule))
            refuse_copies(units, self.plan.strategy, SHARDED_AVERAGE)
            keep_requires_grad(model)
        return self.compile(model)

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` compiled as the run says."""
        return compile_model(model, self.plan.dynamo, self.spec.hooks_inside)

    @abstractmethod
    def parallelize(self, model: torch.nn.Module) -> None:
        """Give `model` the weights of rank 0, and replace its parameters by shards, in place.

        Args:
            model: as the user built it; of ranks other than 0, it may be on the meta device.
        """

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer` over the shards that this rank holds."""
        own, models = unwrap_optimizer(optimizer), self._models
        models.remap.record_copies(copies_and_shards(models()))
        models.remap.follow(optimizer)
        self._check_kind(own)
        reshard_before_steps(own, models)
        if self._mesh is not None:
            check_first_step(own, self._mesh, self.comm, models.names)
        step_by_mesh(own)
        return super().wrap_optimizer(optimizer, place)

    def _check_kind(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose first step fails on DTensors."""
        kind = fails_on_shards(optimizer)
        held = (p for group in optimizer.param_groups for p in group["params"])
        if kind is not None and any(isinstance(parameter, DTensor) for parameter in held):
            raise ConfigError(
                Problem(
                    f"prepare: {kind} with {self.plan.strategy}",
                    "torch cannot compute its update on sharded weights (DTensor)",
                    "Use AdamW or SGD, or train without sharding (DDP).",
                )
            )

    def close(self) -> None:
        """Destroy the mesh and its groups, after what is under way on any process."""
        if self._mesh is not None and self._in_group():
            synchronize(self.device)
            self.comm.barrier()
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        models = self._models()
        self._models.clear()
        if self._mesh is not None:
            leave(self._mesh, models, self._in_group())
        self._mesh = None

    def _in_group(self) -> bool:
        return dist.is_initialized() and not self.comm.closed


def sharded_scaler(
    plan: Plan, comm: Communicator, models: ShardedModels
) -> ShardedStepScaler | None:
    """Return the gradient scaler of fp16; None in other formats."""
    if plan.mixed_precision != "fp16":
        return None
    return ShardedStepScaler(plan.device_type, comm, models, **plan.scaler.to_dict())
