"""Averages of the weights over training, with which the run is evaluated and saved.

An average is kept of each tensor that an optimizer steps: a parameter, this rank's shard of it, or
a full-precision copy. Models get the averages for an evaluation and for a checkpoint, and the
training weights back after it. A checkpoint holds the averages as the weights of its models, so
that all that reads one uses them, and the training weights in the optimizers' state, which every
strategy and world size can read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel.machine.errors import ConfigError, Problem, Problems
from accel.machine.memory import local
from accel.optimizer import unwrap_optimizer
from runner.training.run import Callback

if TYPE_CHECKING:
    from runner.training.run import Run

# Keys of an optimizer's state in a checkpoint.
TRAINED, AVERAGE = "trained", "average"


class Averaging(Callback):
    """Base of callbacks that average weights; a subclass says when, and with which weight."""

    def __init__(self) -> None:
        self.num_updates = 0
        self._averages: dict[torch.Tensor, torch.Tensor] = {}  # by what the optimizers step
        self._trained: dict[torch.Tensor, torch.Tensor] = {}  # while models hold the averages
        self._restored = False

    @abstractmethod
    def on_step(self, loop: Run) -> None:
        """Begin the averages by `begin`, and update them by `update`, where due."""

    def begin(self, loop: Run) -> None:
        """Begin the averages as the weights of now."""
        for _, tensor in _stepped(loop):
            kind = torch.promote_types(tensor.dtype, torch.float32)
            self._averages[tensor] = tensor.detach().to(kind, copy=True)

    @torch.no_grad()
    def update(self, loop: Run, weight: float) -> None:
        """Move the averages by a share `weight` of their distance to the weights of now."""
        averages, weights = [], []
        for _, tensor in _stepped(loop):
            if tensor not in self._averages:  # added since
                self._averages[tensor] = tensor.detach().clone()
            average = local(self._averages[tensor])
            averages.append(average)
            weights.append(local(tensor).to(average.dtype))
        torch._foreach_lerp_(averages, weights, weight)
        self.num_updates += 1

    def on_start(self, loop: Run) -> None:
        """Take averages and training weights apart after a resume.

        Raises:
            ConfigError: if the weights of an optimizer cannot be averaged.
        """
        trained = {}
        ConfigError.raise_if(list(_problems(loop)))
        for optimizer, tensor in _stepped(loop):
            weights, average = _take(optimizer, tensor)
            if self._restored and weights is not None:
                trained[tensor] = weights
                average = tensor.detach().clone() if average is None else average
            if self._restored and average is not None:
                self._averages[tensor] = average
        if trained:
            _write(loop, trained)

    def on_evaluation_start(self, loop: Run, split: str) -> None:
        """Give the models the averages, unless they were given the best state's."""
        if not loop.saver.best_is_loaded:
            self._exchange(loop)

    def on_evaluation_end(self, loop: Run, split: str) -> None:
        """Give the models the training weights back."""
        self._restore(loop)

    def on_save_start(self, loop: Run) -> None:
        """Give the models the averages, and the optimizers' state the training weights."""
        self._exchange(loop)
        for optimizer, tensor in _stepped(loop):
            average = self._averages.get(tensor)
            if tensor in self._trained:
                optimizer.state[tensor][TRAINED] = self._trained[tensor]
            if average is not None and (tensor.dtype != average.dtype or not self._trained):
                optimizer.state[tensor][AVERAGE] = average

    def on_save_end(self, loop: Run) -> None:
        """Undo `on_save_start`."""
        for optimizer, tensor in _stepped(loop):
            _take(optimizer, tensor)
        self._restore(loop)

    def _exchange(self, loop: Run) -> None:
        self._trained = {tensor: tensor.detach().clone() for tensor in self._averages}
        _write(loop, self._averages)

    def _restore(self, loop: Run) -> None:
        _write(loop, self._trained)
        self._trained = {}

    def state_dict(self) -> dict[str, object]:
        """Return the number of updates."""
        return {"updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count; `on_start` finds the averages."""
        self.num_updates, self._restored = state["updates"], True


class EMA(Averaging):
    """Evaluates and saves an exponential moving average of the weights.

    After each update, average = decay · average + (1 - decay) · weights. Buffers, such as running
    statistics of normalization, are those of training.

    Args:
        decay: share of the old average in the new one, from 0 to 1.
        warmup: whether update t, counted from 0, has a decay of at most (1 + t) / (10 + t), so that
            the average does not stay at the initial weights.
        every: optimizer steps between updates.
        start: optimizer step whose weights the average begins with.

    Raises:
        ConfigError: if an argument is out of range.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """

    def __init__(
        self, decay: float = 0.999, warmup: bool = True, every: int = 1, start: int = 0
    ) -> None:
        super().__init__()
        problems = Problems()
        if not 0 <= decay < 1:
            rule = "it is at least 0 and below 1"
            problems.add(f"ema.decay={decay}", rule, "Give 0.999, or 0.9999 for long runs.")
        if every < 1:
            problems.add(f"ema.every={every}", "it is at least 1", "Give 1.")
        if start < 0:
            problems.add(f"ema.start={start}", "it is at least 0", "Give 0.")
        problems.raise_if()
        self.decay, self.warmup, self.every, self.first = decay, warmup, every, start

    def on_start(self, loop: Run) -> None:
        """Begin the average; continue with a restored one."""
        super().on_start(loop)
        if not self._averages and loop.state.step >= self.first:
            self.begin(loop)

    def on_step(self, loop: Run) -> None:
        """Update the average where due."""
        since = loop.state.step - self.first
        if since == 0:
            self.begin(loop)
        elif since > 0 and since % self.every == 0:
            t = self.num_updates
            decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
            self.update(loop, 1 - decay)


def _stepped(loop: Run) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Yield each tensor that an optimizer steps, with the optimizer.

    An engine may take them out of the groups between steps, and leave their state.
    """
    for optimizer in loop.step.optimizers.values():
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        held += [key for key in optimizer.state if isinstance(key, torch.Tensor)]
        yield from ((optimizer, tensor) for tensor in dict.fromkeys(held))


def _problems(loop: Run) -> Iterator[Problem]:
    """Yield why the weights of an optimizer cannot be averaged."""
    found = {id(optimizer) for optimizer, _ in _stepped(loop)}
    for name, optimizer in loop.step.optimizers.items():
        own = unwrap_optimizer(optimizer)
        value = f"averaged weights with {name}: {type(own).__name__}"
        if hasattr(own, "train"):  # it has weights of its own for evaluation
            yield Problem(value, "it averages weights itself", "Take the callback out.")
        elif id(optimizer) not in found:
            rule = "the engine gives it weights during a step only, and it has no state of them"
            yield Problem(value, rule, "Choose one with state, such as SGD with momentum.")


def _take(
    optimizer: torch.optim.Optimizer, tensor: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Take training weights and average of a tensor out of an optimizer's state."""
    found = optimizer.state.get(tensor, {})
    values = found.pop(TRAINED, None), found.pop(AVERAGE, None)
    if not found:  # optimizers initialize what has no state
        optimizer.state.pop(tensor, None)
    return values


@torch.no_grad()
def _write(loop: Run, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Write values to tensors that optimizers step, and make the models follow them."""
    if not values:
        return
    for tensor, value in values.items():
        local(tensor).copy_(local(value))
    state = loop.accelerator.strategy.state
    for model in loop.step.models.values():
        # Gathered parameters and copies in another precision are of the old values.
        state.load_model_state(model, state.sharded_model_state(model))
