"""How one optimizer step is made: the `Step` interface and the supervised one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel.errors import ConfigError, Problem
from accel.loss_normalization import global_weight, normalize_loss
from runner.data.micro_batch import MicroBatch, Window
from runner.training import return_checks

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.config.schema import Trainer
    from runner.training.objective import Objective


class Step(ABC):
    """Owns models and optimizers, and makes one optimizer step from a window of micro-batches.

    A class registered with ``@register.step(name)`` is called with the arguments of the recipe's
    `step` node. Parameters of its constructor called `model`, `objective`, `optimizer` or
    `scheduler` receive what the recipe's node of that name builds, and so does ``**kwargs`` where
    the node is not null; other nodes that the constructor does not name must be null. `optimizer`
    is a function ``optimizer(model) -> torch.optim.Optimizer`` and `scheduler`
    ``scheduler(optimizer, num_steps) -> LRScheduler``.

    The contract of `train`: the update is that of the gradient of the loss over *all* samples of
    the window, on all processes: summed loss over summed weight (samples or tokens), however they
    are cut into micro-batches and processes. `Accelerator.backward` divides by the micro-batches of
    the window, and DDP averages over processes. So a loss that is normalised by the weight of the
    whole window comes out too small by both; give `backward` what
    `accel.loss_normalization.normalize_loss(total, weight, grad_size=…, num_steps=…)` returns.
    A mean over each micro-batch is right only where all are of one size and nothing is padded or
    masked (`MicroBatch.valid`). ``runner debug=fdr`` compares one micro-batch with two.

    Attributes:
        models: by name; the runner replaces them by the prepared ones before the first step.
        optimizers: likewise.
        monitor: the evaluation metric by which states are compared.
        mode: whether its best is the "max" or the "min".
    """

    monitor: str = "loss"
    mode: str = "min"
    models: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]

    def make_schedulers(self, num_steps: int) -> dict[str, Any]:
        """Return a learning-rate scheduler per optimizer name, for a run of `num_steps` steps."""
        return {}

    @abstractmethod
    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        """Make one optimizer step.

        Returns:
            0-d tensors on the device: this process's share of each value to log, so that the sum
            over processes is the value (for a loss: the local sum over the global weight). `loss`
            is the one that the progress bar shows. Nothing here may wait for the device.
        """

    @abstractmethod
    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...], under no_grad and eval mode."""

    @abstractmethod
    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: each [N, ...]."""

    def predict(self, batch: Any) -> Any:
        """Return predictions as nested tensors, each [B, ...]."""
        name = type(self).__name__
        remedy = f"Define {name}.predict(batch), which returns tensors [B, ...]."
        raise ConfigError(Problem(f"step {name}", "it defines no predict", remedy))


class SupervisedStep(Step):
    """One model, one objective, one optimizer; the gradient of summed loss over summed weight.

    Shapes: B samples in the batch of one process.

    Args:
        model: what is trained.
        objective: what is minimised and measured.
        optimizer: makes the optimizer of a model.
        scheduler: makes the schedule of an optimizer for a number of steps; None: a constant rate.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    ) -> None:
        self.objective = objective
        self.monitor, self.mode = objective.monitor, objective.mode
        self.models = {"model": model}
        self.optimizers = {"optimizer": optimizer(model)}
        self._make_scheduler = scheduler

    def make_schedulers(self, num_steps: int) -> dict[str, Any]:
        """Return the schedule of the one optimizer, if the recipe has any."""
        if self._make_scheduler is None:
            return {}
        return {"optimizer": self._make_scheduler(self.optimizers["optimizer"], num_steps)}

    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        """Accumulate the window's gradients, clip them and step.

        Returns:
            `loss`, and `grad_norm` (before clipping) where gradients are clipped by norm.
        """
        model, optimizer = self.models["model"], self.optimizers["optimizer"]
        weight = self._weight(accelerator, window)
        dims = accelerator.parallel_dims
        scale = {
            "grad_size": dims.grad_size,
            "num_steps": accelerator.gradient_accumulation_steps,
        }
        shares: list[torch.Tensor] = []
        values: dict[str, torch.Tensor] = {}
        last = len(window.micro_batches) - 1
        for index, micro_batch in enumerate(window.micro_batches):
            with accelerator.accumulate(model, sync_gradients=index == last):
                total = self._total_loss(model, micro_batch)
                accelerator.backward(normalize_loss(total, weight, **scale))
                shares.append(total.detach())
                if index == last:
                    values = clip_gradients(accelerator, model, trainer)
                    optimizer.step()
                    optimizer.zero_grad()
        share = shares[0] if last == 0 else torch.stack(shares).sum()
        return {"loss": share / weight / dims.num_copies, **values}

    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the objective's values, each [B, ...]."""
        return self.objective.evaluate(self.models["model"], batch)

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the objective's metrics of a data set, from values [N, ...]."""
        return self.objective.summarize(values)

    def predict(self, batch: Any) -> Any:
        """Return the objective's predictions, each [B, ...]."""
        return self.objective.predict(self.models["model"], batch)

    def _weight(self, accelerator: Accelerator, window: Window) -> torch.Tensor | int:
        """Return the weight of the window over all processes, never zero."""
        sums: list[torch.Tensor | int] = []
        for micro_batch in window.micro_batches:
            weights = return_checks.weights(
                self.objective, self.objective.weights(micro_batch.batch)
            )
            if weights is None:
                return window.num_samples
            sums.append(keep_valid(weights, micro_batch.valid).sum())
        weight = global_weight(sums, accelerator.comm)
        if not isinstance(weight, torch.Tensor):
            return weight
        # A window in which every item is masked has a loss of 0 / 0; it is to change nothing.
        weight = torch.where(weight == 0, 1, weight)
        copies = accelerator.parallel_dims.num_copies
        return weight / copies if copies > 1 else weight  # counted as often as it is computed

    def _total_loss(self, model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the summed loss of the real samples: []."""
        losses = return_checks.losses(
            self.objective, self.objective.losses(model, micro_batch.batch)
        )
        return keep_valid(losses, micro_batch.valid).sum()


def keep_valid(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [B] with zeros where `valid` [B] is False, be they finite or not."""
    return values if valid is None else torch.where(valid, values, 0)


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, trainer: Trainer
) -> dict[str, torch.Tensor]:
    """Clip the gradients of `model` as the recipe says.

    Returns:
        `grad_norm`: this process's share of the total norm before clipping, if that is bounded.
    """
    values: dict[str, torch.Tensor] = {}
    if trainer.clip_grad_norm is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), trainer.clip_grad_norm)
        values["grad_norm"] = norm.detach() / accelerator.num_processes
    if trainer.clip_grad_value is not None:
        accelerator.clip_grad_value_(model.parameters(), trainer.clip_grad_value)
    return values
