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
from torch.nn.modules.batchnorm import _BatchNorm

from accel.machine.errors import ConfigError, Problems
from accel.machine.memory import local
from accel.optimizer import unwrap_optimizer
from runner.data.batches import eval_batches
from runner.data.datasets import num_samples
from runner.training.evaluation import evaluation_mode
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
        """Begin the averages as the weights of now.

        Raises:
            ConfigError: if the engine does not keep those of an optimizer between its steps.
        """
        found = {id(optimizer) for optimizer, _ in _stepped(loop)}
        for name, optimizer in loop.step.optimizers.items():
            if id(optimizer) not in found:
                raise ConfigError.of(
                    f"averaged weights with {name}: {type(unwrap_optimizer(optimizer)).__name__}",
                    "the engine gives it weights during a step only, and it has no state of them",
                    "Choose one with state, such as SGD with momentum.",
                )
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
            ConfigError: if an optimizer averages weights itself.
        """
        for name, optimizer in loop.step.optimizers.items():
            own = unwrap_optimizer(optimizer)
            if hasattr(own, "train"):  # it has other weights for evaluations
                value = f"averaged weights with {name}: {type(own).__name__}"
                rule, remedy = "it averages weights itself", "Take the callback out."
                raise ConfigError.of(value, rule, remedy)
        trained = {}
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
        start: optimizer step after which the average begins with the weights.

    Raises:
        ConfigError: if an argument is out of range.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """

    def __init__(
        self, decay: float = 0.999, warmup: bool = True, every: int = 1, start: int = 1
    ) -> None:
        super().__init__()
        problems = Problems()
        if not 0 <= decay < 1:
            rule = "it is at least 0 and below 1"
            problems.add(f"ema.decay={decay}", rule, "Give 0.999, or 0.9999 for long runs.")
        if every < 1:
            problems.add(f"ema.every={every}", "it is at least 1", "Give 1.")
        if start < 1:
            rule = "it is at least 1: an average begins with the weights after that step"
            problems.add(f"ema.start={start}", rule, "Give 1.")
        problems.raise_if()
        self.decay, self.warmup, self.every, self.first = decay, warmup, every, start

    def on_step(self, loop: Run) -> None:
        """Update the average where due."""
        since = loop.state.step - self.first
        if since >= 0 and not self._averages:
            self.begin(loop)
        elif since >= 0 and since % self.every == 0:
            t = self.num_updates
            decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
            self.update(loop, 1 - decay)


class SWA(Averaging):
    """Evaluates and saves the equal average of the weights over the last part of training.

    With BatchNorm layers, whose statistics are not those of averaged weights, it does so from the
    end of training on: one pass over the training data computes the statistics anew.

    Args:
        start: optimizer step from which weights are averaged, or a fraction below 1 of all steps.
        every: optimizer steps between averaged weights; None: those at the end of each epoch.
        lr: constant learning rate from `start` on; None: that of the schedule.

    Raises:
        ConfigError: if an argument is out of range.

    Source: https://arxiv.org/abs/1803.05407
    """

    def __init__(
        self, start: int | float = 0.75, every: int | None = None, lr: float | None = None
    ) -> None:
        super().__init__()
        problems = Problems()
        if start < 0 or (start >= 1 and start != int(start)):
            rule = "it is a step, or a fraction of all steps below 1"
            problems.add(f"swa.start={start}", rule, "Give 0.75.")
        if every is not None and every < 1:
            remedy = "Leave it out for the ends of epochs."
            problems.add(f"swa.every={every}", "it is at least 1", remedy)
        if lr is not None and lr <= 0:
            problems.add(f"swa.lr={lr}", "it is greater than 0", "Leave it out.")
        problems.raise_if()
        self.first, self.every, self.lr = start, every, lr
        self._statistics: dict[torch.Tensor, torch.Tensor] = {}  # of training, while exchanged
        self._saved_statistics: list[torch.Tensor] = []
        self._measured: tuple[int, list[torch.Tensor]] = (-1, [])  # step, statistics of averages

    def on_setup(self, loop: Run) -> None:
        """Find the first step.

        Raises:
            ConfigError: if the number of steps is to be known, and is not.
        """
        total, problems = loop.plan.total_steps, Problems()
        if 0 < self.first < 1 and total is None:
            rule = "a fraction of all steps needs their number, which a stream does not tell"
            problems.add(f"swa.start={self.first}", rule, "Give a step, or trainer.max_steps.")
        if _batch_norms(loop) and num_samples(loop.data.train) is None:
            rule = "a pass over the training data computes the statistics of BatchNorm layers"
            problems.add("swa with a stream", rule, "Use callbacks=ema, or another normalization.")
        problems.raise_if()
        self.first = int(self.first * (total or 0) if self.first < 1 else self.first)

    def on_start(self, loop: Run) -> None:
        """Continue with a restored average."""
        super().on_start(loop)
        for (_, buffer), value in zip(_statistics(loop), self._saved_statistics, strict=False):
            buffer.copy_(value)
        self._hold_rate(loop)

    def on_step(self, loop: Run) -> None:
        """Update the average where due, and hold the rate."""
        since = loop.state.step - self.first
        if self.every is not None and since >= 0 and since % self.every == 0:
            self._average(loop)
        self._hold_rate(loop)

    def on_epoch_end(self, loop: Run) -> None:
        """Update the average where due."""
        if self.every is None and loop.state.step >= self.first:
            self._average(loop)

    def _average(self, loop: Run) -> None:
        if not self._averages:
            self.begin(loop)
        self.update(loop, 1 / (self.num_updates + 1))

    def _hold_rate(self, loop: Run) -> None:
        if self.lr is None or loop.state.step < self.first:
            return
        for optimizer in loop.step.optimizers.values():
            for group in optimizer.param_groups:
                rate = group["lr"]
                group["lr"] = rate.fill_(self.lr) if isinstance(rate, torch.Tensor) else self.lr

    def _exchange(self, loop: Run) -> None:
        layers = _batch_norms(loop)
        if layers and not loop.complete:
            return
        super()._exchange(loop)
        if not layers or not self._averages:
            return
        found = [buffer for _, buffer in _statistics(loop)]
        self._statistics = {buffer: buffer.clone() for buffer in found}
        if self._measured[0] != loop.state.step:
            _measure(loop, layers)
            self._measured = loop.state.step, [buffer.clone() for buffer in found]
        for buffer, value in zip(found, self._measured[1], strict=True):
            buffer.copy_(value)

    def _restore(self, loop: Run) -> None:
        super()._restore(loop)
        for buffer, value in self._statistics.items():
            buffer.copy_(value)
        self._statistics = {}

    def state_dict(self) -> dict[str, object]:
        """Return the number of updates, and the statistics of training that models lack."""
        return {**super().state_dict(), "statistics": list(self._statistics.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count; `on_start` finds the averages."""
        super().load_state_dict(state)
        self._saved_statistics = state["statistics"]


def _batch_norms(loop: Run) -> list[_BatchNorm]:
    """Return the layers with running statistics of batches."""
    modules = (module for model in loop.step.models.values() for module in model.modules())
    return [m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]


def _statistics(loop: Run) -> list[tuple[_BatchNorm, torch.Tensor]]:
    """Return the buffers of the layers with running statistics of batches, each with its layer."""
    return [(m, buffer) for m in _batch_norms(loop) for buffer in m.buffers(recurse=False)]


@torch.no_grad()
def _measure(loop: Run, layers: list[_BatchNorm]) -> None:
    """Compute running statistics anew: those of the training data in the mean over its batches.

    Layers that `evaluate` of the step does not reach keep theirs.

    Source: https://docs.pytorch.org/docs/stable/optim.html#torch.optim.swa_utils.update_bn
    """
    accelerator, step, prepared = loop.accelerator, loop.step, loop.step.models
    before = [(buffer, buffer.clone()) for _, buffer in _statistics(loop)]
    momenta = [layer.momentum for layer in layers]
    (batches,) = eval_batches(accelerator, loop.data, loop.recipe, "train").values()
    # A wrapper would replace the statistics of each rank by those of the first.
    step.models = {name: accelerator.unwrap_model(model) for name, model in prepared.items()}
    try:
        with evaluation_mode(step):
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
                layer.momentum = None
            for index, batch in enumerate(batches, start=1):
                step.evaluate(batch)
                loop.stop_flag.progress.batch(batches, index)
    finally:
        step.models = prepared
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    for (layer, buffer), (_, value) in zip(_statistics(loop), before, strict=True):
        if not layer.num_batches_tracked:
            buffer.copy_(value)
        elif buffer.is_floating_point():
            buffer.copy_(accelerator.reduce(buffer, "mean"))


def _stepped(loop: Run) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Yield each tensor that an optimizer steps, with the optimizer.

    An engine may take them out of the groups between steps, and leave their state.
    """
    for optimizer in loop.step.optimizers.values():
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        held += [key for key in optimizer.state if isinstance(key, torch.Tensor)]
        yield from ((optimizer, tensor) for tensor in dict.fromkeys(held))


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
