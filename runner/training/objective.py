"""Objectives: losses, metrics and predictions of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel.machine.errors import ConfigError


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
        losses = self.losses(model, batch)
        weights = self.weights(batch)
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
