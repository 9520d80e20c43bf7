"""How one optimizer step is made: the `Step` interface and the supervised one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from accel import Accelerator
    from runner.schema import Trainer


@dataclass
class MicroBatch:
    """What one process computes in one forward pass.

    Attributes:
        batch: as collated, on the device.
        valid: [B] bool, False where a sample only pads the batch; None: all are real.
    """

    batch: Any
    valid: torch.Tensor | None = None


@dataclass
class Window:
    """The micro-batches of one optimizer step on this process.

    Attributes:
        micro_batches: in order; every process has as many.
        num_samples: real samples of the step over all processes.
    """

    micro_batches: list[MicroBatch]
    num_samples: int


class Step(ABC):
    """Owns models and optimizers, and makes one optimizer step from a window of micro-batches.

    A class registered with ``@register.step(name)`` is called with the arguments of the recipe's
    `step` node. Parameters of its constructor called `model`, `objective`, `optimizer` or `scheduler`
    receive what the recipe's node of that name builds; nodes that the constructor does not name must be
    null. `optimizer` is a function ``optimizer(model) -> torch.optim.Optimizer`` and `scheduler`
    ``scheduler(optimizer, num_steps) -> LRScheduler``.

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
            0-d tensors on the device: this process's share of each value to log, so that the sum over
            processes is the value (for a loss: the local sum over the global weight). `loss` is the
            one that the progress bar shows. Nothing here may wait for the device.
        """

    @abstractmethod
    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...], under no_grad and eval mode."""

    @abstractmethod
    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: each [N, ...]."""

    def predict(self, batch: Any) -> Any:
        """Return predictions as nested tensors, each [B, ...]."""
        raise NotImplementedError(f"{type(self).__name__} defines no `predict(batch)`.")
