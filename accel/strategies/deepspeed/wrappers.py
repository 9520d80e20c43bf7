"""Optimizer and scheduler of an engine, as `prepare` returns them: the engine makes the step."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, final

import torch

from accel.errors import ConfigError, Problem
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.strategies.deepspeed.dummies import DummyOptim
from accel.strategies.deepspeed.manual_changes import ByHand
from accel.strategies.trainable import Trainable

# Attributes of torch's schedulers that hold a value for each group of the optimizer.
BY_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums"),
)


@final
class DeepSpeedOptimizer(AcceleratedOptimizer):
    """The optimizer that an engine steps.

    Args:
        engine: its `DeepSpeedEngine`.
        groups: the parameters of each group, as they were before the engine took them.
        given: what `prepare` was given: the optimizer itself, or its stand-in.

    Attributes:
        engine: its `DeepSpeedEngine`.
        groups: the same as above, but for empty ones.
        step_was_skipped: whether the last step was left out because gradients overflowed.
        trainable: the parameters of the model, as the engine knows them.
        window_ended: whether the gradients of a whole window wait for the step.
    """

    def __init__(
        self,
        engine: Any,
        groups: list[list[torch.nn.Parameter]],
        given: torch.optim.Optimizer,
    ) -> None:
        self.engine = engine
        self._kept = [bool(group) for group in groups]
        self.groups = [group for group in groups if group]  # the engine drops empty ones
        self.window_ended = False
        self._clipping = float(engine.gradient_clipping())
        inner = getattr(engine.optimizer, "optimizer", engine.basic_optimizer)
        if inner is not engine.basic_optimizer:  # Adagrad is built anew, in one group of defaults
            inner.param_groups = engine.basic_optimizer.param_groups
        self._given = weakref.ref(given)
        self.trainable = Trainable(engine.module)
        self._by_hand = ByHand(engine)
        super().__init__(inner, device_placement=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the engine update the parameters if a window of micro-batches is complete.

        Args:
            closure: none: the engine computes no loss.

        Raises:
            ConfigError: for a closure.
        """
        if closure is not None:
            raise ConfigError(
                Problem(
                    "optimizer.step(closure) under DeepSpeed",
                    "its engine makes the step, and calls no closure",
                    "Use an optimizer that needs none.",
                )
            )
        if not self.gradient_state.sync_gradients:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        self._by_hand.check()
        self.engine.step()
        self._by_hand.note()
        self.window_ended = False
        self.step_was_skipped = not self.engine.was_step_applied()
        self._set_clipping(self._clipping)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients if a window of micro-batches is complete; the engine's step does, too.

        Args:
            set_to_none: not used: the engine decides.
        """
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()
            if self.engine.optimizer is not self.optimizer:
                self.engine.optimizer.zero_grad()
            self.window_ended = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the engine steps the parameters that it was built with.

        Args:
            param_group: not used.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            Problem(
                "add_param_group under DeepSpeed",
                "its engine steps the parameters that require gradients at prepare",
                "Give the optimizer all groups before prepare; a rate of 0 leaves one as it is.",
            )
        )

    def follow(self, scheduler: Any) -> None:
        """Let a scheduler that was built on what `prepare` was given set the live learning rates.

        Args:
            scheduler: any; those of other optimizers stay as they are.

        Raises:
            ConfigError: if it was computed from another learning rate.
        """
        given = self._given()
        built_on = getattr(scheduler, "optimizer", None)
        if given is None or built_on is not given:
            return
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            self._drop_empty_groups(part)
        if given is self.optimizer:
            return
        if isinstance(given, DummyOptim):
            self._take_rates(given, type(scheduler).__name__)
        # torch's check of the order of calls wants `step` marked, as a new scheduler does it; that
        # sets the rates to their initial ones, which a warm-up does not begin with.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.optimizer = self.optimizer
        for part in getattr(scheduler, "_schedulers", ()):
            part.optimizer = self.optimizer

    def _drop_empty_groups(self, scheduler: Any) -> None:
        """Take out of a scheduler what it holds of groups that the engine dropped."""
        for name in BY_GROUP:
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) == len(self._kept):
                setattr(scheduler, name, list(itertools.compress(values, self._kept)))

    def _take_rates(self, given: DummyOptim, name: str) -> None:
        rates = given.lr, self.optimizer.defaults["lr"]
        if rates[0] != rates[1]:
            raise ConfigError(
                Problem(
                    f"{name} on DummyOptim(lr={rates[0]!r}), and the engine's is {rates[1]!r}",
                    "the schedule starts from the rate of the optimizer that it was built on",
                    'Write "auto" for optimizer.params.lr, or make them equal.',
                )
            )
        for live, stand_in in zip(self.optimizer.param_groups, given.param_groups, strict=True):
            live.update({k: stand_in[k] for k in ("lr", "initial_lr") if k in stand_in})

    @property
    def clipping(self) -> float:
        """The largest norm of gradients that the configuration tells; 0: not clipped."""
        return self._clipping

    def clip_next_step(self, max_norm: float) -> None:
        """Let the next step clip gradients to `max_norm`."""
        self._set_clipping(max_norm)

    def _set_clipping(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm [] of the gradients that the next step takes. Called on every rank.

        Infinite under stages 1 to 3 if a gradient is not finite: the step will be skipped.
        """
        optimizer = self.engine.optimizer
        scale = float(getattr(optimizer, "cur_scale", None) or 1.0)
        if hasattr(optimizer, "loss_scale"):
            scale = float(optimizer.loss_scale)
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            norms = [torch.as_tensor(norm).float() for norm in optimizer._get_norm_groups()]
            groups = torch.stack(norms)
            not_finite = (groups < 0).any()  # DeepSpeed's mark
            return torch.where(not_finite, math.inf, torch.linalg.vector_norm(groups)) / scale
        if hasattr(optimizer, "scaled_global_norm"):
            return torch.as_tensor(optimizer.scaled_global_norm()) / scale
        if hasattr(optimizer, "get_grads_for_norm"):  # bf16 summed up in fp32, outside the weights
            gradients = optimizer.get_grads_for_norm(for_clipping=True)
        else:
            weights = self.engine.module.parameters()
            gradients = [p.grad for p in weights if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) / scale


@final
class DeepSpeedScheduler(AcceleratedScheduler):
    """A scheduler that its engine steps, at each of its own steps.

    Args:
        scheduler: the engine's.
        optimizer: the engine's `DeepSpeedOptimizer`.
    """

    def __init__(self, scheduler: Any, optimizer: DeepSpeedOptimizer) -> None:
        super().__init__(scheduler, optimizer, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine stepped it with the optimizer.

        Args:
            args: not used.
            kwargs: not used.
        """
