"""The interface of a strategy, which distributes a model over processes, and that of one process.

A strategy is one class in one room; strategies never inherit from each other. The defaults are
right for one process. What a strategy does differently is in the class itself (preparing, the
backward pass) or in one of its capabilities: `sync`, `gradients`, `state`.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar, final

import torch

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, state_by_name
from accel.comm.ops import send_to_device
from accel.logging import get_logger
from accel.machine.device import copies_in_order
from accel.machine.errors import ConfigError, Problem, StateError
from accel.optimizer import AcceleratedOptimizer, unwrap_optimizer
from accel.precision import bf16_weights
from accel.precision.amp import StepScaler, parameters_of
from accel.precision.wrapping import is_dispatched, own_module
from accel.scheduler import wrap_scheduler
from accel.strategies import optimizers as kinds
from accel.strategies.compile import compile_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.checkpoint.sharded import Allocate
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision
    from accel.strategies.context_parallel import ContextParallel
    from accel.strategies.spec import StrategySpec


@dataclass
class Objects:
    """The objects given to `prepare`, by kind; strategies replace entries by their wrapped form.

    `custom` are objects registered for checkpointing.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def extend(self, other: Objects) -> None:
        """Append what `other` holds, kind by kind."""
        self.models += other.models
        self.optimizers += other.optimizers
        self.schedulers += other.schedulers
        self.dataloaders += other.dataloaders
        self.custom += other.custom

    def clear_prepared(self) -> None:
        """Forget the prepared objects; those registered for checkpointing stay."""
        for kind in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kind.clear()


logger = get_logger(__name__)

Batch = TypeVar("Batch")
# The attribute of a model that says whether it was prepared for evaluation alone.
EVALUATED = "_is_prepared_for_evaluation"


class Accumulation(Protocol):
    """What `Strategy.forward_backward` needs of the run's gradient accumulation."""

    device_placement: bool

    def accumulate(
        self, *models: torch.nn.Module, sync_gradients: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; `sync_gradients`: whether it ends the window."""

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a loss [], scaled for accumulation and precision."""


class Sync:
    """When gradients are synchronized over data-parallel ranks; for one process, never.

    `joins_uneven`: whether `join` lets ranks see different numbers of batches.
    """

    joins_uneven: ClassVar[bool] = False

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes through `model` reduce no gradients."""
        return contextlib.nullcontext()

    def trigger(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward reduces gradients after forwards under `no_sync`."""
        return contextlib.nullcontext()

    def join(self, joinables: Sequence[object]) -> AbstractContextManager[None]:
        """Return a context in which ranks may see different numbers of batches."""
        return contextlib.nullcontext()


class Gradients:
    """Scaling and clipping of gradients, and the tensors that optimizers step.

    `scaler` scales losses under fp16, and skips steps whose gradients overflowed; None: nothing
    does.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self.scaler = scaler

    def stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that optimizers hold for `parameters` of a prepared model."""
        return list(parameters)

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that an optimizer steps for `parameters` that are added to it.

        Raise `ConfigError` if they would be trained wrongly.
        """
        return self.stepped(parameters)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`; return the norm [] before."""
        entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(entry.dtype == torch.bfloat16 for entry in entries):
            return torch.nn.utils.clip_grad_norm_(entries, max_norm, norm_type=norm_type)
        return bf16_weights.clip_norm(entries, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp each gradient's elements to ±`clip_value`."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)


class StateIO:
    """State dicts of models and optimizers by parameter name; every rank calls each method."""

    @final
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module; its names are those of a portable state dict.

        Wrappers that were registered are taken off, as by `unwrap_model`.
        """
        own = own_module(model)
        self.expose(own)
        return own

    def expose(self, own: torch.nn.Module) -> None:
        """Give a user's own module the tensors that its state dict is of; it has them already."""

    @property
    def sharded(self) -> tuple[str, ...]:
        """Names of sharded state, for the run header: parameters, gradients, optimizer state."""
        return ()

    def num_elements(self, parameter: torch.nn.Parameter) -> int:
        """Return the elements of a parameter, all of them where this rank holds a fragment."""
        return parameter.numel()

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by parameter name, without a wrapper's prefix."""
        own = self.unwrap(model)
        if not is_dispatched(own):
            return own.state_dict()
        from accel.weights.state import get_state_dict_offloaded_model

        return get_state_dict_offloaded_model(own)

    @property
    def saves_shards(self) -> bool:
        """Whether each rank saves its own shards: `sharded_model_state`, not `model_state`."""
        return False

    def sharded_model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a model as `model_state` does, but as this rank's shards."""
        return self.model_state(model)

    def sharded_optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        """Return an optimizer's state as `optimizer_state` does, but as this rank's shards."""
        return self.optimizer_state(optimizer, names)

    def allocate_weights(self, model: torch.nn.Module) -> Allocate | None:
        """Return a function that allocates what sharded weights are read into; None: full ones.

        It is called with a name (in a tuple), size and dtype.
        """
        return None

    def allocate_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> Allocate | None:
        """Return the same for an optimizer's state; called with (parameter's key, name), …"""
        return None

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        """Load what `model_state` returned, from any strategy and world size, or shards of it."""
        from accel.weights.state import load_quantized

        own = self.unwrap(model)
        own.load_state_dict(load_quantized(own, state), strict=strict)
        if is_dispatched(own):
            from accel.weights.state import offloaded_names

            if names := offloaded_names(own):
                logger.info(
                    "%d offloaded weights have the checkpoint's values where they lie.", len(names)
                )

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        """Return an optimizer's state, in full tensors, by the names of all models' parameters."""
        return state_by_name(unwrap_optimizer(optimizer), names)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        """Load what `optimizer_state` returned, from any strategy and world size, or shards."""
        load_by_name(unwrap_optimizer(optimizer), state, names)


class Strategy(ABC):
    """One way to distribute a model over processes.

    A module that `wrap_model` puts around a model has it as its `module`, and its class is
    decorated with `precision.wrapping.register_wrapper`: all that takes wrappers off then knows it.

    Args:
        plan: the resolved configuration of the run.
        comm: how this process talks to the others.
        device: where this process computes.
        precision: the number format of forward and backward passes.

    Attributes:
        sync: when gradients are synchronized.
        gradients: how they are scaled and clipped.
        state: full state dicts, out and in.
        context_parallel: what divides sequences over ranks; None: nothing does.
    """

    spec: StrategySpec
    context_parallel: ContextParallel | None = None

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        self.plan, self.spec = plan, plan.spec
        self.comm = comm
        self.device = device
        self.precision = precision
        self.sync = Sync()
        self.gradients = Gradients(None if self.spec.owns_precision else make_scaler(plan))
        self.state = StateIO()
        self._num_optimizers = 0  # that were wrapped

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The `DeviceMesh` of the run, if the strategy has one."""
        return None

    @property
    def wrapped_engine(self) -> object | None:
        """The engine that trains, wrapped for loops by hand; None without an engine."""
        return None

    # -- preparing -------------------------------------------------------------------------

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return the models, optimizers and schedulers of `objects`, wrapped for training.

        Args:
            objects: what the caller prepares in one call; its loaders are prepared already.
            placement: of the same lengths; booleans: whether an object is moved to the device.
            prepared: what earlier calls returned.
            evaluation: whether the models are only evaluated.

        Raises:
            ConfigError: if the strategy cannot take these objects together.
        """
        models = [
            self.wrap_model(model, place, evaluation)
            for model, place in zip(objects.models, placement.models, strict=True)
        ]
        if self.plan.parallel_dims.grad_size > 1:
            _refuse_evaluated(objects.optimizers, [*prepared.models, *models])
        optimizers = [
            self.wrap_optimizer(optimizer, place)
            for optimizer, place in zip(objects.optimizers, placement.optimizers, strict=True)
        ]
        for scheduler in prepared.schedulers:
            scheduler.follow(optimizers)
        known = [*prepared.optimizers, *optimizers]
        schedulers = [wrap_scheduler(entry, known, self.plan) for entry in objects.schedulers]
        return Objects(models, optimizers, schedulers, objects.dataloaders)

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` on the device, in the run's precision and the strategy's wrapper."""
        setattr(model, EVALUATED, evaluation)
        self.precision.convert(model, evaluation)
        if place and not is_dispatched(model):
            model = model.to(self.device)
        self.precision.wrap_forward(model)
        # After autocast and before a container such as DDP, which then still sees each gradient
        # as soon as it is there.
        return compile_model(model, self.plan.dynamo, self.spec.hooks_inside)

    def wrap_again(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a prepared `model`, wrapped again if a change of its parameters requires that."""
        return model

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer` as it steps in this run."""
        own = unwrap_optimizer(optimizer)
        kinds.prepare_optimizer(own, self.comm.world_size)
        bf16_weights.prepare_optimizer(own, self.comm, self._num_optimizers)
        self._num_optimizers += 1
        gradients = self.gradients
        return AcceleratedOptimizer(
            optimizer, device_placement=place, scaler=gradients.scaler, admit=gradients.admit
        )

    def wrap_loader(self, loader: Any) -> Any:
        """Return a prepared loader as this run reads it; ``loader.transform`` changes batches."""
        return loader

    def init_context(self) -> AbstractContextManager[None]:
        """Return the context in which models are built: sharded, or without memory, if need be."""
        return contextlib.nullcontext()

    # -- the step --------------------------------------------------------------------------

    def context(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: Collection[torch.Tensor] = (),
    ) -> AbstractContextManager[None]:
        """Return the context in which `buffers` are divided over the ranks of a sequence."""
        if self.context_parallel is None:
            return contextlib.nullcontext()
        return self.context_parallel.divided(buffers, seq_dims, no_restore)

    def _parts(self, batches: list[Batch]) -> AbstractContextManager[list[Batch]]:
        """Return the context of micro-batches: of this rank's part of their sequences."""
        if self.context_parallel is None:
            return contextlib.nullcontext(batches)
        return self.context_parallel.micro_batches(batches)

    def forward_backward(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
        accumulation: Accumulation,
    ) -> list[torch.Tensor]:
        """Do what `Accumulation.forward_backward` does: by default, one micro-batch at a time.

        An override moves each micro-batch to the device where `accumulation.device_placement` is
        set, and calls `loss_fn` and `accumulation.backward` for each inside
        ``accumulation.accumulate(model, sync_gradients=...)``, true for the last of the window
        alone: it says when gradients are synchronized. It returns the losses, detached.
        """
        losses = []
        last = len(micro_batches) - 1
        for index, micro_batch in enumerate(micro_batches):
            placed = self._place(micro_batch, accumulation.device_placement)
            with (
                accumulation.accumulate(model, sync_gradients=index == last),
                self._parts([placed]) as (part,),
            ):
                loss = loss_fn(model, part)
                accumulation.backward(loss)
                losses.append(loss.detach())
        return losses

    def _place(self, batch: Batch, moves: bool) -> Batch:
        return send_to_device(batch, self.device, copies_in_order(self.device)) if moves else batch

    # Bound once: at every step.
    backward: Callable[..., None] = staticmethod(torch.Tensor.backward)
    """Compute gradients of a loss [], already scaled for accumulation and precision."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Drop references to wrapped objects. Nothing by default."""


def make_scaler(plan: Plan) -> StepScaler | None:
    """Return the gradient scaler of fp16; None in other formats."""
    is_scaled = plan.mixed_precision == "fp16"
    return StepScaler(plan.device_type, **plan.scaler.to_kwargs()) if is_scaled else None


def _refuse_evaluated(
    optimizers: Iterable[torch.optim.Optimizer], models: Iterable[torch.nn.Module]
) -> None:
    """Refuse optimizers whose gradients no rank averages: those of evaluated models."""
    evaluated = [model for model in models if getattr(own_module(model), EVALUATED, False)]
    ids = {id(p) for model in evaluated for p in model.parameters()}
    for optimizer in optimizers:
        count = sum(id(p) in ids and p.requires_grad for p in parameters_of(optimizer))
        if count:
            raise ConfigError.of(
                f"prepare: {count} parameters of an optimizer, of a model prepared for evaluation",
                "its gradients are not averaged over the ranks, which would drift apart",
                "Prepare it without evaluation_mode.",
            )


@final
class SingleProcessStrategy(Strategy):
    """The whole model in one process."""


def _refuse_copy(memo: object) -> NoReturn:
    """Raise, in place of the ``__deepcopy__`` of a module whose parameters are shards."""
    problem = Problem(
        "copy.deepcopy of a model that is sharded (also torch's AveragedModel)",
        "its parameters are shards that belong to the engine; a copy would not follow them",
        "To average weights, copy the model before prepare, and update the copy from "
        "accelerator.get_state_dict(model), which all processes call. Or keep it in shards, where "
        "the strategy takes two models: prepare(model, copy, optimizer).",
    )
    raise StateError(str(problem))


def refuse_copies(modules: Iterable[Any]) -> None:
    """Let `copy.deepcopy` of each of `modules` raise `StateError`."""
    for module in modules:
        module.__deepcopy__ = _refuse_copy
