"""The interface every backend implements. Its defaults are right for one process.

A backend is one class in one file or folder; backends never inherit from each other. `Traits` tell
the engine what it needs to know without asking which backend it is.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, state_by_name
from accel.data.base import PreparedLoader
from accel.data.prepare import prepare_data_loader
from accel.errors import CheckpointError, Problem
from accel.memory_estimate import Footprint, num_bytes, state_bytes
from accel.optimizer import AcceleratedOptimizer, unwrap_optimizer
from accel.precision.amp import StepScaler
from accel.prepared import Objects
from accel.scheduler import AcceleratedScheduler
from accel.strategies.compile import compile_model
from accel.wrapping import own_module

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision


@dataclass(frozen=True)
class Traits:
    """What the engine may know about a backend.

    Attributes:
        name: key in the strategy table.
        owns_precision: whether the backend casts weights by itself, below autocast, and scales
            losses where that is wanted.
        owns_accumulation: whether the backend counts micro-batches itself.
        owns_parameters: whether optimizers hold tensors of the backend after `prepare`, and not
            the models' own parameters.
        hooks_inside: whether the backend works between the layers of a model, so that
            `torch.compile` takes its repeated blocks unless the run says otherwise.
        joins_uneven: whether `join` lets processes see different numbers of batches.
    """

    name: str
    owns_precision: bool = False
    owns_accumulation: bool = False
    owns_parameters: bool = False
    hooks_inside: bool = False
    joins_uneven: bool = False


class Strategy(ABC):
    """One way to distribute a model over processes.

    Args:
        plan: the resolved configuration of the run.
        comm: how this process talks to the others.
        device: where this process computes.
        precision: the number format of forward and backward passes.

    Attributes:
        scaler: what scales losses, and skips steps whose gradients overflowed; None: nothing does.
        num_loaders: how many loaders were prepared; each draws permutations of its own.
    """

    traits: ClassVar[Traits]

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        self.plan = plan
        self.comm = comm
        self.device = device
        self.precision = precision
        self.scaler = self.make_scaler()
        self.num_loaders = 0

    # -- where data goes -------------------------------------------------------------------

    @property
    def device_mesh(self) -> Any | None:
        """The `DeviceMesh` of the run, if the backend has one."""
        return None

    @property
    def sharded(self) -> tuple[str, ...]:
        """What lies in parts on several processes, in words for people; () for nothing."""
        return ()

    @property
    def weights_on_first(self) -> bool:
        """Whether models come to `prepare` with weights on the first process alone."""
        return False

    def footprint(
        self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> Footprint:
        """Return the bytes that this process holds once a step is made. Exchanges nothing.

        Args:
            models: prepared.
            optimizers: prepared.
        """
        held = [parameter for model in models for parameter in model.parameters()]
        states = [state_bytes(unwrap_optimizer(optimizer)) for optimizer in optimizers]
        return Footprint(
            num_bytes(held),
            num_bytes(parameter for parameter in held if parameter.requires_grad),
            None if None in states else sum(size or 0 for size in states),
        )

    # -- preparing -------------------------------------------------------------------------

    def validate(self, objects: Objects) -> None:  # noqa: B027 (most take any)
        """Raise `ConfigError` if the backend cannot take these objects together."""

    def prepare(
        self,
        objects: Objects,
        placement: Objects,
        prepared: Objects,
        evaluation: bool = False,
        slice_fn: Any | None = None,
    ) -> Objects:
        """Return `objects` wrapped for training.

        Args:
            objects: what the caller prepares in one call.
            placement: of the same lengths; booleans that tell what is moved to the device.
            prepared: what earlier calls returned.
            evaluation: whether the models are only evaluated.
            slice_fn: takes this process's part of a dispatched batch; None: `slice_tensors`.
        """
        models = [
            self.wrap_model(model, place, evaluation)
            for model, place in zip(objects.models, placement.models, strict=True)
        ]
        optimizers = [
            self.wrap_optimizer(optimizer, place)
            for optimizer, place in zip(objects.optimizers, placement.optimizers, strict=True)
        ]
        known = [*prepared.optimizers, *optimizers]
        return Objects(
            models=models,
            optimizers=optimizers,
            schedulers=[self.wrap_scheduler(scheduler, known) for scheduler in objects.schedulers],
            dataloaders=self.wrap_dataloaders(objects, placement, slice_fn),
        )

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` on the device, in the run's precision and the backend's wrapper."""
        if place:
            model = model.to(self.device)
        self.precision.wrap_forward(model)
        return self.compile_model(model)

    def compile_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` compiled as the run says, or as it is.

        It comes after the forward pass under autocast and before a container such as DDP, which
        then still sees each gradient as soon as it is there. Backends that put hooks into the model
        (`Traits.hooks_inside`) call it after that, and get the same object back.
        """
        return compile_model(model, self.plan.dynamo, self.traits.hooks_inside)

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer` as it steps in this run."""
        return AcceleratedOptimizer(
            optimizer, device_placement=place, scaler=self.scaler, admit=self.admit
        )

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
        """Return `scheduler` following its own optimizer if that is known, else all of them."""
        inner = getattr(scheduler, "optimizer", None)
        own = [known for known in optimizers if unwrap_optimizer(known) is inner or known is inner]
        return AcceleratedScheduler(
            scheduler,
            own or list(optimizers),
            step_with_optimizer=self.plan.step_scheduler_with_optimizer,
            split_batches=self.plan.dataloader.split_batches,
            dp_size=self.plan.parallel_dims.dp_size,
        )

    def follow(
        self, scheduler: AcceleratedScheduler, optimizers: Sequence[AcceleratedOptimizer]
    ) -> None:
        """Let a prepared scheduler follow optimizers that are prepared after it."""
        scheduler.follow(optimizers)

    def wrap_dataloader(self, loader: Any, place: bool = True, slice_fn: Any | None = None) -> Any:
        """Return a loader that yields this process's batches, on the device if `place`."""
        if isinstance(loader, PreparedLoader):
            return loader
        dims, config = self.plan.parallel_dims, self.plan.dataloader
        loader_index, self.num_loaders = self.num_loaders, self.num_loaders + 1
        return prepare_data_loader(
            loader,
            self.device,
            num_processes=dims.dp_size,
            process_index=dims.dp_rank,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=list(self.plan.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            loader_index=loader_index,
        )

    def wrap_dataloaders(
        self, objects: Objects, placement: Objects, slice_fn: Any | None = None
    ) -> list[Any]:
        """Return the loaders of `objects`, each as `wrap_dataloader` returns it."""
        return [
            self.wrap_dataloader(loader, place, slice_fn)
            for loader, place in zip(objects.dataloaders, placement.dataloaders, strict=True)
        ]

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module; its names are those of a portable state."""
        return own_module(model)

    # -- the step --------------------------------------------------------------------------

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return what scales losses under fp16; None in other formats, or if the engine does."""
        if self.plan.mixed_precision != "fp16" or self.traits.owns_precision:
            return None
        return StepScaler(self.plan.device_type, **self.plan.scaler.to_dict())

    backward: Callable[..., None] = staticmethod(torch.Tensor.backward)
    """Compute gradients of a loss [], already scaled for accumulation and precision."""

    def init_context(self) -> AbstractContextManager[None]:
        """Context in which models are built: engines that shard may have them built in parts."""
        return contextlib.nullcontext()

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes through `model` exchange no gradients."""
        return contextlib.nullcontext()

    def trigger_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward exchanges gradients after forwards under `no_sync`."""
        return contextlib.nullcontext()

    def join(self, joinables: Sequence[Any], **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context in which ranks may see different numbers of batches."""
        return contextlib.nullcontext()

    def stepped_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what optimizers hold for `parameters` of a prepared model."""
        return list(parameters)

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what an optimizer steps for `parameters` that are added to it.

        Raises:
            ConfigError: if they would be trained wrongly.
        """
        return self.stepped_parameters(parameters)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp each gradient's elements to ±`clip_value`."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    # -- state -----------------------------------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors by parameter name (full tensors, no wrapper prefix)."""
        return self.unwrap_model(model).state_dict()

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        """Load what `model_state` returned, from any backend and world size."""
        self.unwrap_model(model).load_state_dict(state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, in whole tensors. Called on every rank.

        Args:
            optimizer: prepared.
            names: the names of all prepared models' parameters.
        """
        return state_by_name(unwrap_optimizer(optimizer), names)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        """Load what `optimizer_state` returned, from any backend and world size.

        Args:
            optimizer: prepared.
            state: by parameter name, in whole tensors.
            names: the names of all prepared models' parameters.
        """
        load_by_name(unwrap_optimizer(optimizer), state, names)

    def save_native(self, model: torch.nn.Module, folder: Path) -> None:
        """Write model and optimizer in the engine's own format. Called on every rank.

        Raises:
            CheckpointError: if it has none.
        """
        self._refuse_native("save_native", "Call save_state.")

    def load_native(self, model: torch.nn.Module, folder: Path) -> None:
        """Read what `save_native` wrote, which can run code. Called on every rank.

        Raises:
            CheckpointError: if the engine has no format of its own.
        """
        self._refuse_native("load_native", "Call load_state.")

    def _refuse_native(self, what: str, remedy: str) -> None:
        name = self.traits.name
        problem = Problem(f"{what} under {name}", "it has no format of its own", remedy)
        raise CheckpointError(problem)

    @contextlib.contextmanager
    def portable(self) -> Iterator[None]:
        """Context in which `model_state` may be called on every rank (gathers where it must)."""
        yield

    def release(self) -> None:
        """Drop references to wrapped objects, draining what is under way first."""
        self.comm.flush()
