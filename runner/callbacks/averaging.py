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
from torch.optim.swa_utils import update_bn

from accel.machine.errors import ConfigError
from accel.machine.memory import local
from accel.optimizer import unwrap_optimizer
from runner.data.batches import eval_batches
from runner.training.hyperparameters import give
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
        """Call `update` where due."""

    @torch.no_grad()
    def update(self, loop: Run, weight: float) -> None:
        """Move the averages by a share `weight` of their distance to the weights of now.

        An average begins as the weights of its first update.

        Raises:
            ConfigError: if the engine does not keep those of an optimizer between its steps.
        """
        stepped = list(_stepped(loop))
        for name, optimizer in loop.step.optimizers.items() if not self._averages else ():
            if optimizer not in [owner for owner, _ in stepped]:
                rule = "the engine gives it weights during a step only, and it has no state of them"
                remedy = "Choose one with state, such as SGD with momentum."
                raise ConfigError.of(_value(name, optimizer), rule, remedy)
        averages, weights = [], []
        for _, tensor in stepped:
            if tensor not in self._averages:
                self._averages[tensor] = _begun(tensor)
            averages.append(local(self._averages[tensor]))
            weights.append(local(tensor).to(averages[-1].dtype))
        torch._foreach_lerp_(averages, weights, weight)
        self.num_updates += 1

    def on_start(self, loop: Run) -> None:
        """Take averages and training weights apart after a resume.

        Raises:
            ConfigError: if an optimizer averages weights itself, or an engine hides its weights.
        """
        for name, optimizer in loop.step.optimizers.items():
            if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
                rule = "the engine hides the weights that it steps"
                remedy = "Take the callback out, or choose another strategy."
                raise ConfigError.of(_value(name, optimizer), rule, remedy)
            if hasattr(unwrap_optimizer(optimizer), "train"):  # other weights for evaluations
                rule, remedy = "it averages weights itself", "Take the callback out."
                raise ConfigError.of(_value(name, optimizer), rule, remedy)
        trained = {}
        for optimizer, tensor in _stepped(loop):
            weights, average = _take(optimizer, tensor)
            if self._restored and weights is not None:
                trained[tensor] = weights
            if self._restored and self.num_updates:
                self._averages[tensor] = _begun(tensor) if average is None else average
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
        stateful = [each for each in loop.step.optimizers.values() if any(each.state.values())]
        for optimizer, tensor in _stepped(loop):
            if optimizer in stateful and not optimizer.state.get(tensor):
                continue  # It was not stepped yet, and no optimizer loads a part of its state.
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
        warmup: whether update t, counted from 0 after the first, has a decay of at most
            (1 + t) / (10 + t), so that the average does not stay at early weights.
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
        if not 0 <= decay < 1 or every < 1 or start < 1:
            value = f"ema.decay={decay} every={every} start={start}"
            rule = "a decay is at least 0 and below 1, the others count steps from 1 on"
            raise ConfigError.of(value, rule, "Give ema.decay=0.999 alone.")
        self.decay, self.warmup, self.every, self.first = decay, warmup, every, start

    def on_step(self, loop: Run) -> None:
        """Update the average where due."""
        since = loop.state.step - self.first
        if since >= 0 and (since % self.every == 0 or not self._averages):
            t = self.num_updates - 1  # the first one begins the average
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
        if start < 0 or every == 0 or lr == 0 or min(every or 1, lr or 1) < 0:
            rule = "start is at least 0, every at least 1 and lr above 0"
            value = f"swa.start={start} every={every} lr={lr}"
            raise ConfigError.of(value, rule, "Give swa.start=0.75 alone.")
        self.first, self.every, self.lr = start, every, lr
        self._statistics: list[torch.Tensor] = []  # of training, where models have others

    def on_setup(self, loop: Run) -> None:
        """Find the first step.

        Raises:
            ConfigError: if the number of steps is to be known, and is not.
        """
        total = loop.plan.total_steps
        if 0 < self.first < 1 and total is None:
            rule = "a fraction of all steps needs their number, which a stream does not tell"
            remedy = "Give a step, or trainer.max_steps."
            raise ConfigError.of(f"swa.start={self.first}", rule, remedy)
        self.first = int(self.first * (total or 0) if self.first < 1 else self.first)

    def on_start(self, loop: Run) -> None:
        """Continue with a restored average."""
        super().on_start(loop)
        for buffer, value in zip(_buffers(loop), self._statistics, strict=False):
            buffer.copy_(value)
        self._statistics = []
        self._hold_rate(loop)

    def on_step(self, loop: Run) -> None:
        """Update the average where due, and hold the rate."""
        since = loop.state.step - self.first
        if self.every is not None and since >= 0 and since % self.every == 0:
            self.update(loop, 1 / (self.num_updates + 1))
        self._hold_rate(loop)

    def on_epoch_end(self, loop: Run) -> None:
        """Update the average where due."""
        if self.every is None and loop.state.step >= self.first:
            self.update(loop, 1 / (self.num_updates + 1))

    def _hold_rate(self, loop: Run) -> None:
        for optimizer in loop.step.optimizers.values():
            if self.lr is not None and loop.state.step >= self.first:
                for group in optimizer.param_groups:
                    give(group, {"lr": self.lr}, ["lr"])

    def _exchange(self, loop: Run) -> None:
        layers = _batch_norms(loop)
        if not layers or loop.complete:
            super()._exchange(loop)
        # They stay: nothing trains any more.
        if layers and self._trained and not self._statistics:
            self._statistics = [buffer.clone() for buffer in _buffers(loop)]
            _measure(loop, layers)

    def state_dict(self) -> dict[str, object]:
        """Return the number of updates, and the statistics of training that models lack."""
        return {**super().state_dict(), "statistics": self._statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count; `on_start` finds the averages."""
        super().load_state_dict(state)
        self._statistics = state["statistics"]


def _batch_norms(loop: Run) -> list[_BatchNorm]:
    """Return the layers with running statistics of batches."""
    modules = (module for model in loop.step.models.values() for module in model.modules())
    return [m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]


def _buffers(loop: Run) -> list[torch.Tensor]:
    return [buffer for layer in _batch_norms(loop) for buffer in layer.buffers(recurse=False)]


def _measure(loop: Run, layers: list[_BatchNorm]) -> None:
    """Compute running statistics anew, with one pass of `evaluate` over the training data.

    Layers that it does not reach keep theirs.
    """
    step, prepared, accelerator = loop.step, loop.step.models, loop.accelerator
    before = [(m, buffer, buffer.clone()) for m in layers for buffer in m.buffers(recurse=False)]
    (batches,) = eval_batches(accelerator, loop.data, loop.recipe, "train").values()
    # A wrapper would replace the statistics of each rank by those of the first.
    step.models = {name: accelerator.unwrap_model(model) for name, model in prepared.items()}
    measured: Any = torch.nn.ModuleDict(step.models)
    measured.forward = lambda batch: loop.stop_flag.progress.batch(step.evaluate(batch))
    update_bn(([batch] for batch in batches), measured)
    step.models = prepared
    for layer, buffer, value in before:
        if not layer.num_batches_tracked:
            buffer.copy_(value)
        elif buffer.is_floating_point():
            buffer.copy_(accelerator.reduce(buffer, "mean"))


def _begun(tensor: torch.Tensor) -> torch.Tensor:
    """Return an average that begins as the weights of now."""
    kind = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(kind, copy=True)


def _stepped(loop: Run) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Yield each tensor that an optimizer steps, with the optimizer.

    An engine may take them out of the groups between steps, and leave their state.
    """
    for optimizer in loop.step.optimizers.values():
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        held += [key for key in optimizer.state if isinstance(key, torch.Tensor)]
        yield from ((optimizer, tensor) for tensor in dict.fromkeys(held))


def _value(name: str, optimizer: torch.optim.Optimizer) -> str:
    return f"averaged weights with {name}: {type(unwrap_optimizer(optimizer)).__name__}"


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
