"""From micro-batches to an optimizer step: accumulation, backward passes, clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel.machine.errors import ConfigError, StateError
from accel.optimizer import unwrap_optimizer
from accel.precision.amp import StepScaler, has_gradients, parameters_of
from accel.precision.bf16_weights import sum_in_fp32
from accel.state import GradientState
from accel.strategies.base import Objects

if TYPE_CHECKING:
    from accel.plan.plan import Plan
    from accel.strategies.base import Strategy

Batch = TypeVar("Batch")


class Accumulation:
    """Windows of micro-batches, their backward passes, clipping: a part of the `Accelerator`.

    Attributes:
        plan: everything decided, frozen.
        strategy: how the model is distributed.
        device_placement: whether micro-batches, and objects that are prepared from now on, are
            moved to the device.
        gradient_state: where the current window stands.
        scaler: the gradient scaler of fp16, or None.
    """

    plan: Plan
    strategy: Strategy
    device_placement: bool
    gradient_state: GradientState
    scaler: Any
    _objects: Objects

    def _start_accumulation(self) -> None:
        self.device_placement = self.plan.device_placement
        self.gradient_state = GradientState(self.plan.accumulation)
        self.scaler = self.strategy.gradients.scaler
        self._windows = Windows(self.gradient_state)
        self._divides_loss = not self.strategy.spec.owns_accumulation
        self._has_windows = False

    def _restart(self) -> None:
        """Forget the open window, and set `step` to 0."""
        self.step = 0
        self.gradient_state._start_over()

    # -- accumulation --------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """The micro-batches of an optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        plugin = dataclasses.replace(self.plan.accumulation, num_steps=num_steps)
        self.gradient_state = GradientState(plugin)

    @property
    def step(self) -> int:
        """The micro-batches since the end of the last pass over a loader."""
        return self._windows.step

    @step.setter
    def step(self, step: int) -> None:
        self._windows.step = step

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an optimizer step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was left out because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._objects.optimizers)

    def accumulate(
        self, *models: torch.nn.Module, sync_gradients: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of one micro-batch.

        In all but the last of a window, optimizers and schedulers do not step, gradients are not
        dropped, and backward passes through `models` exchange none.

        The end of a loader ends a window with the micro-batch of its last batch, also where batches
        are fetched ahead of their micro-batches: the batches given less the micro-batches are those
        that wait. A loop that takes them one by one may skip some, but the first of a pass with
        `skip_first_batches`. Of loaders that are read side by side, as in ``zip(train, other)``,
        the first one counts.

        Args:
            models: the models that the micro-batch trains.
            sync_gradients: whether this micro-batch ends the window; None: counts them, and the end
                of a loader ends a window, too.

        Raises:
            ConfigError: for a model that is no module.

        Example:
            >>> for inputs, targets in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(loss_function(model(inputs), targets))
            ...         optimizer.step()
            ...         scheduler.step()
            ...         optimizer.zero_grad()
        """
        if sync_gradients is None and self.gradient_state.num_steps == 1:
            return self._windows
        return _MicroBatchContext(self, self.strategy, models, sync_gradients)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Exchange no gradients in backward passes inside the context.

        Args:
            model: the model; None: every prepared one.
        """
        self._sum_in_fp32()
        with ExitStack() as stack:
            for entry in self._objects.models if model is None else [model]:
                stack.enter_context(self.strategy.sync.no_sync(entry))
            yield

    def _sum_in_fp32(self) -> None:
        """Sum gradients of bf16 weights in fp32 over windows of several micro-batches."""
        if self._divides_loss:  # else the engine accumulates
            self._has_windows = True
            sum_in_fp32(map(unwrap_optimizer, self._objects.optimizers))

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward exchanges gradients after forwards under `no_sync`.

        Args:
            model: the prepared model.
        """
        return self.strategy.sync.trigger(model)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[object], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let processes that run out of batches wait for the others without a deadlock.

        Does nothing for one process.

        Args:
            joinables: prepared models, or optimizers that shard their state.
            even_batches: takes the place of the loaders' own setting inside the context. Streams
                keep theirs, and so do all loaders where the backend cannot join.
        """
        if self.plan.world_size == 1:
            yield
            return
        own = even_batches if self.strategy.sync.joins_uneven else None
        with self._even_batches(own), self.strategy.sync.join(joinables):
            yield

    @contextlib.contextmanager
    def _even_batches(self, even_batches: bool | None) -> Iterator[None]:
        if even_batches is None:
            yield
            return
        before = []
        for loader in self._objects.dataloaders:
            target = _evens_batches(loader)
            if target is None:
                warnings.warn(
                    "join_uneven_inputs: even_batches does not concern a loader over a stream.",
                    stacklevel=4,
                )
            else:
                before.append((target, target.even_batches))
                target.even_batches = even_batches
        try:
            yield
        finally:
            for target, value in before:
                target.even_batches = value

    # -- the step ------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss` over the micro-batches of a step, scaled under fp16.

        Args:
            loss: [] of one micro-batch.
            kwargs: for `torch.Tensor.backward`; `learning_rate` for LOMO optimizers.
        """
        num_steps = self.gradient_state.num_steps
        if num_steps != 1 and self._divides_loss:
            loss = loss / num_steps
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
            return
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self._has_windows:
            sum_in_fp32(map(unwrap_optimizer, self._objects.optimizers))
        self.strategy.backward(loss, **kwargs)

    def forward_backward(
        self,
        model: torch.nn.Module,
        micro_batches: Iterable[Batch],
        loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Compute the gradients of a window of micro-batches; `optimizer.step()` may follow.

        The strategy decides how forward and backward passes follow each other, and moves each
        micro-batch to the device when it is computed. Each loss is divided by
        `gradient_accumulation_steps`, as by `backward`, and not by the number of micro-batches: the
        gradients are those of the mean loss where both are the same.

        Args:
            model: prepared.
            micro_batches: all of the window on this rank; nested data, on the host or the device.
            loss_fn: from `model` and a micro-batch on the device to its loss [].

        Returns:
            The losses [] of the micro-batches, detached, as `loss_fn` returned them.

        Example:
            >>> accelerator = Accelerator(gradient_accumulation_steps=len(batches))
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> losses = accelerator.forward_backward(
            ...     model, batches, lambda model, batch: loss_function(model(batch[0]), batch[1])
            ... )
            >>> optimizer.step()
            >>> optimizer.zero_grad()
        """
        window = list(micro_batches)
        if len(window) > 1:
            self._sum_in_fp32()
        losses = self.strategy.forward_backward(model, window, loss_fn, self)
        self.step, self.sync_gradients = 0, True  # whatever the strategy did, the window ends here
        return losses

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Compute gradients and update at once, as LOMO optimizers do.

        Args:
            loss: [] loss.
            learning_rate: of this update.

        Raises:
            ConfigError: if no prepared optimizer can.

        Source: https://arxiv.org/abs/2306.09782
        """
        fused = self._updating_in_backward()
        if not fused:
            raise ConfigError.of(
                "lomo_backward",
                "no prepared optimizer has a fused backward pass",
                "Prepare a LOMO optimizer, or call backward(loss).",
            )
        for optimizer in fused:
            optimizer.optimizer.fused_backward(loss, learning_rate)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer updates weights in the backward pass, as LOMO does."""
        return bool(self._updating_in_backward())

    def _updating_in_backward(self) -> list[Any]:
        return [o for o in self._objects.optimizers if hasattr(o.optimizer, "fused_backward")]

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the scale of fp16; nothing in other precisions, or a second time.

        Args:
            optimizer: one or several; None: every prepared one that has gradients.
        """
        if self.scaler is None:
            return
        if optimizer is None:
            chosen: Iterable[torch.optim.Optimizer] = self._objects.optimizers
        else:
            chosen = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        for entry in chosen:
            own = unwrap_optimizer(entry)
            if has_gradients(own):
                self.scaler.unscale_once(own)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Scale gradients so that their total norm is at most `max_norm`.

        Args:
            parameters: whose gradients.
            max_norm: largest norm.
            norm_type: order of the norm.

        Returns:
            [] the norm before.

        Raises:
            StateError: under fp16 while gradients are still accumulated.
        """
        tensors, held = self._unscaled(parameters)
        norm = self.strategy.gradients.clip_norm(tensors, max_norm, norm_type=norm_type)
        if held and isinstance(self.scaler, StepScaler):
            self.scaler.skip_unless_finite(norm, held)
        return norm

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clamp each element of the gradients to ±`clip_value`.

        Args:
            parameters: whose gradients.
            clip_value: largest magnitude.

        Raises:
            StateError: under fp16 while gradients are still accumulated.
        """
        self.strategy.gradients.clip_value(self._unscaled(parameters)[0], clip_value)

    def _unscaled(
        self, parameters: torch.Tensor | Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer]]:
        """Unscale the optimizers that hold any of `parameters`; return these, and the former."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        holders: list[torch.optim.Optimizer] = []
        if self.scaler is None or not self.scaler.is_enabled():
            return tensors, holders
        if not self.gradient_state.sync_gradients:
            raise StateError(
                "Gradients are clipped while they are accumulated, and what is added later is "
                "still scaled. Clip inside `if accelerator.sync_gradients:`."
            )
        tensors = self.strategy.gradients.stepped(tensors)
        loose = {id(tensor): tensor for tensor in tensors}
        given = set(loose)
        for optimizer in self._objects.optimizers:
            held = {id(p) for p in parameters_of(optimizer)}
            if not held.isdisjoint(given):
                self.unscale_gradients(optimizer)
                holders.append(unwrap_optimizer(optimizer))
                loose = {key: tensor for key, tensor in loose.items() if key not in held}
        self.scaler.unscale_loose(loose.values())
        return tensors, holders


class Windows:
    """Where the windows of accumulation stand, and the context of a window of one micro-batch.

    Entered at every step: hence one object for all of them, slots, and plain attributes. `step`
    counts micro-batches since the end of the last pass over a loader.
    """

    __slots__ = ("state", "step")

    def __init__(self, state: GradientState) -> None:
        self.state = state
        self.step = 0

    def __enter__(self) -> None:
        state = self.state
        state.sync_gradients = True
        self.step = 0 if state.end_of_dataloader and state.sync_with_dataloader else self.step + 1

    def __exit__(self, *error: object) -> None:
        """Nothing is to be undone."""


class _MicroBatchContext:
    """The context of one micro-batch out of several of a window."""

    __slots__ = ("_exits", "_models", "_owner", "_strategy", "_sync", "_windows")

    def __init__(
        self,
        owner: Accumulation,
        strategy: Strategy,
        models: tuple[torch.nn.Module, ...],
        sync: bool | None,
    ) -> None:
        self._owner = owner
        self._windows = owner._windows
        self._strategy = strategy
        self._models = models
        self._sync = sync
        self._exits: ExitStack | None = None

    def __enter__(self) -> None:
        state, sync = self._windows.state, self._ends_window()
        if not (state.sync_gradients and sync):
            self._owner._sum_in_fp32()
        state.sync_gradients = sync
        if not sync and self._models and not state.sync_each_batch:
            self._exits = ExitStack()
            for model in self._models:
                self._exits.enter_context(self._strategy.sync.no_sync(model))

    def _ends_window(self) -> bool:
        """Count this micro-batch; return whether it is the last of its window."""
        windows, state = self._windows, self._windows.state
        is_last = state.num_steps != 1 and state.end_of_dataloader
        if self._sync is not None:
            windows.step = 0 if self._sync else windows.step + 1
            return self._sync
        at_end = is_last and state.sync_with_dataloader
        windows.step = 0 if at_end else windows.step + 1
        return at_end or windows.step % state.num_steps == 0

    def __exit__(self, *error: object) -> None:
        if self._exits is not None:
            self._exits.close()


def _evens_batches(loader: Any) -> Any | None:
    """Return the part of a prepared loader that completes last batches, None for a stream."""
    for candidate in (loader, loader.batch_sampler, loader.sampler):
        while candidate is not None:
            if hasattr(candidate, "even_batches"):
                return candidate
            candidate = getattr(candidate, "batch_sampler", None)
    return None
