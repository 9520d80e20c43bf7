"""The learning-rate scheduler as `prepare` returns it: it steps when its optimizer did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel.optimizer import AcceleratedOptimizer, unwrap_optimizer
from accel.state import GradientState, PartialState

if TYPE_CHECKING:
    from accel.plan.plan import Plan


class AcceleratedScheduler:
    """A scheduler that steps only when its optimizers stepped.

    The schedule is one written for one process: each step stands for as many steps as there are
    processes, because each process takes a batch of its own. (A `ReduceLROnPlateau` counts
    measurements, so it steps once.) A schedule with an end (`OneCycleLR`) stops there, since the
    processes' steps together may overshoot it. Where batches are split over processes, a step is a
    step, and the wrapped scheduler's own rules hold.

    Everything else is the wrapped scheduler's own.

    Args:
        scheduler: anything with `step`, such as a `torch.optim.lr_scheduler.LRScheduler`.
        optimizers: the prepared optimizer, or several; where one skips a step, so does this.
        step_with_optimizer: whether steps follow the optimizer's; if not, `step` is passed on.
        split_batches: whether loaders split their batches over processes.
        dp_size: data-parallel size; None: the number of processes.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        dp_size: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        self._find_skippable()
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        once = split_batches or isinstance(scheduler, ReduceLROnPlateau)
        every = PartialState().num_processes if dp_size is None else dp_size
        self._repeats = 1 if once else every
        self._ends = not once and hasattr(scheduler, "total_steps")

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _find_skippable(self) -> None:
        self._skippable = [o for o in self.optimizers if hasattr(o, "step_was_skipped")]

    def follow(self, optimizers: Sequence[AcceleratedOptimizer]) -> None:
        """Follow optimizers that were prepared after this scheduler.

        A scheduler that has an optimizer follows only that one; another one follows all.

        Args:
            optimizers: newly prepared.
        """
        inner = getattr(self.scheduler, "optimizer", None)
        own = [optimizer for optimizer in optimizers if inner in (optimizer, optimizer.optimizer)]
        if own:
            self.optimizers = list(own)
        elif inner is None:
            self.optimizers += optimizers
        self._find_skippable()

    def step(self, *args: object, **kwargs: object) -> None:
        """Move on if the optimizers did: once per process, and not past a schedule's last step.

        Args:
            args, kwargs: of the wrapped scheduler's `step`, such as a `ReduceLROnPlateau`'s metric.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            self._count_call()
            return
        for optimizer in self._skippable:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._repeats):
            if not self._ends or self.scheduler.last_epoch < self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    def _count_call(self) -> None:
        """Count a call between optimizer steps, so that torch's check of the call order holds."""
        if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
            self.scheduler._step_count += 1

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """Return the rates of the wrapped scheduler for its current step."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: object, **kwargs: object) -> None:
        """Print the learning rate, as the wrapped scheduler does or in one line a group.

        Args:
            args, kwargs: of the wrapped scheduler's `print_lr`, which torch no longer has.
        """
        if hasattr(self.scheduler, "print_lr"):
            self.scheduler.print_lr(*args, **kwargs)
            return
        for group, rate in enumerate(self.get_last_lr()):
            PartialState().print(f"Learning rate of group {group}: {rate:.4e}")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state_dict: state of a scheduler of the same kind.
        """
        self.scheduler.load_state_dict(state_dict)


def wrap_scheduler(
    scheduler: Any, optimizers: Sequence[torch.optim.Optimizer], plan: Plan
) -> AcceleratedScheduler:
    """Return `scheduler`, anything with `step`, wrapped to follow the prepared `optimizers`.

    It follows its own optimizer if that is known, else all of them.
    """
    inner = getattr(scheduler, "optimizer", None)
    own = [known for known in optimizers if unwrap_optimizer(known) is inner or known is inner]
    return AcceleratedScheduler(
        scheduler,
        own or list(optimizers),
        step_with_optimizer=plan.step_scheduler_with_optimizer,
        split_batches=plan.dataloader.split_batches,
        dp_size=plan.parallel_dims.dp_size,
    )
