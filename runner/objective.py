"""What a recipe minimises, measures and predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch


class Objective:
    """Base of objectives. All values are per sample, so padded samples can be left out exactly.

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
        and micro-batches.
        """
        return None

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...]. By default the losses and weights."""
        losses = self.losses(model, batch)
        weights = self.weights(batch)
        return {"loss": losses, "weight": torch.ones_like(losses) if weights is None else weights}

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of the whole data set from the values of all its samples: [N, ...]."""
        # On the CPU, because not every device has double precision.
        losses, weights = (values[name].detach().cpu().double() for name in ("loss", "weight"))
        return {"loss": float(losses.sum() / weights.sum())}

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return predictions as nested tensors, each [B, ...]. By default the model's output."""
        return model(batch)
