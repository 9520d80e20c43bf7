"""How one optimizer step is made and measured: `Step`, `Objective` and the supervised step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel.machine.errors import ConfigError
from runner.training import return_checks
from runner.training.optimizer_step import optimizer_step

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.batches import Window
    from runner.recipe.schema import Trainer


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
    are divided into micro-batches and ranks. `runner.optimizer_step` does all of that for one
    optimizer. A step that calls `accelerator.backward` by hand has to undo two divisions:
    `backward` divides by the micro-batches of the window, and gradients are averaged over
    `accelerator.parallel_dims.grad_size` ranks. So it gives `backward` what `runner.normalize_loss`
    returns for the summed loss of a micro-batch (of real samples: `runner.keep_valid`) and the
    weight of the whole window (`Window.num_samples`, or `runner.global_weight`), and clips with
    `runner.clip_gradients`. A mean over each micro-batch is right only where all are of one size
    and nothing is padded or masked. ``runner debug=fdr`` compares one micro-batch with two.

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

    def make_schedulers(self, num_steps: int) -> Mapping[str, LRScheduler]:
        """Return a learning-rate scheduler per optimizer name, for a run of `num_steps` steps."""
        return {}

    @abstractmethod
    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        """Make one optimizer step.

        Returns:
            0-d tensors on the device: this process's share of each value to log, so that the sum
            over processes is the value (for a loss: the local sum over the global weight and
            over `accelerator.parallel_dims.num_copies`, the ranks that compute the same loss).
            `loss` is the one that the progress bar shows. Nothing here may wait for the device.
        """

    @abstractmethod
    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...], under no_grad and eval mode."""

    @abstractmethod
    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: each [N, ...]."""

    def predict(self, batch: Any) -> object:
        """Return predictions as nested tensors, each [B, ...]."""
        name = type(self).__name__
        remedy = f"Define {name}.predict(batch), which returns tensors [B, ...]."
        raise ConfigError.of(f"step {name}", "it defines no predict", remedy)


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
        scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
    ) -> None:
        self.objective = objective
        self.monitor, self.mode = objective.monitor, objective.mode
        self.models = {"model": model}
        self.optimizers = {"optimizer": optimizer(model)}
        self._make_scheduler = scheduler

    def make_schedulers(self, num_steps: int) -> Mapping[str, LRScheduler]:
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
        model, objective = self.models["model"], self.objective

        def losses(model: torch.nn.Module, batch: object) -> torch.Tensor:
            return return_checks.losses(objective, objective.losses(model, batch))

        def weights(batch: object) -> torch.Tensor | None:
            return return_checks.weights(objective, objective.weights(batch))

        optimizer = self.optimizers["optimizer"]
        return optimizer_step(accelerator, window, trainer, model, optimizer, losses, weights)

    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the objective's values, each [B, ...]."""
        return self.objective.evaluate(self.models["model"], batch)

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the objective's metrics of a data set, from values [N, ...]."""
        return self.objective.summarize(values)

    def predict(self, batch: Any) -> object:
        """Return the objective's predictions, each [B, ...]."""
        return self.objective.predict(self.models["model"], batch)


class Objective:
    """Base of objectives. All values are per sample, so that padded samples can be dropped exactly.

    Shapes: B samples in the batch of one process.

    Attributes:
        monitor: the evaluation metric by which states are compared.
        mode: whether its best is the "max" or the "min".
    """

    monitor: ClassVar[str] = "loss"
    mode: ClassVar[str] = "min"

    def losses(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of each sample, summed over its items (tokens, pixels): [B]."""
        raise NotImplementedError(f"{type(self).__name__} defines no `losses(model, batch)`.")

    def weights(self, batch: Any) -> torch.Tensor | None:
        """Return how many items each sample's loss sums over: [B]. None: one each.

        The gradient of a step is that of the summed loss over the summed weight, over all processes
        and micro-batches. So training asks for the weights of a window before its micro-batches
        move to the device: the batch may lie on the host.
        """
        return None

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...]. By default the losses and weights."""
        losses = return_checks.losses(self, self.losses(model, batch))
        weights = return_checks.weights(self, self.weights(batch))
        return {"loss": losses, "weight": torch.ones_like(losses) if weights is None else weights}

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: [N, ...]."""
        # On the CPU, because not every device has double precision.
        losses, weights = (values[name].detach().cpu().double() for name in ("loss", "weight"))
        return {"loss": float(losses.sum() / weights.sum())}

    def predict(self, model: torch.nn.Module, batch: Any) -> object:
        """Return predictions as nested tensors, each [B, ...].

        By default the output of the model in the call that `losses` makes.

        Raises:
            ConfigError: if `losses` calls the model more than once: which output is meant?
        """
        if type(self).losses is Objective.losses:
            return model(batch)
        outputs: list[object] = []
        hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            self.losses(model, batch)
        finally:
            hook.remove()
        if len(outputs) != 1:
            raise ConfigError.of(
                f"{type(self).__name__}.losses called the model {len(outputs)} times",
                "by default its one output is the prediction",
                f"Define {type(self).__name__}.predict(model, batch).",
            )
        return _per_sample(outputs[0])


def _per_sample(output: object) -> object:
    """Return an output without its entries that have no batch dim, such as a loss."""
    if not isinstance(output, Mapping):
        return output
    return {
        name: value
        for name, value in output.items()
        if not (isinstance(value, torch.Tensor) and value.dim() == 0)
    }
