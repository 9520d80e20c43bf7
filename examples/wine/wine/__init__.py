"""Which of three cultivars a wine was made from, classified by 13 chemical measurements.

Shapes: B samples in the batch of one process, N samples of a data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner import Data, Objective, register

NUM_MEASUREMENTS = 13
NUM_CULTIVARS = 3


@register.model("mlp")
def mlp(width: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return a network with one hidden layer: [B, 13] to logits [B, 3].

    Args:
        width: size of the hidden layer.
        dropout: probability that one of its features is dropped.
    """
    return nn.Sequential(
        nn.Linear(NUM_MEASUREMENTS, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, NUM_CULTIVARS),
    )


@register.data("wine")
def wine(standardize: bool = True, split_seed: int = 0) -> Data:
    """Return samples ``(measurements [13], cultivar [])``: 106 train, 36 validation, 36 test.

    Args:
        standardize: whether each measurement has mean 0 and deviation 1 over the training data.
        split_seed: seed of the split; the run's seed does not change it.
    """
    bunch = load_wine()
    rest, test = train_test_split(
        range(len(bunch.target)), test_size=36, stratify=bunch.target, random_state=split_seed
    )
    train, validation = train_test_split(
        rest, test_size=36, stratify=bunch.target[rest], random_state=split_seed
    )
    inputs, targets = torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target)
    if standardize:
        inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
    return Data(*(TensorDataset(inputs[part], targets[part]) for part in (train, validation, test)))


@register.objective("cultivar")
class Cultivar(Objective):
    """Cross-entropy; the metrics are the accuracy and the recall of the worst cultivar."""

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross-entropy of each sample: [B]."""
        measurements, targets = batch
        return F.cross_entropy(model(measurements), targets, reduction="none")

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return the values of the metrics, one row per sample: each [B]."""
        measurements, targets = batch
        logits = model(measurements)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return {"loss": losses, "target": targets, "predicted": logits.argmax(dim=1)}

    def summarize(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: each [N]."""
        correct, targets = values["predicted"] == values["target"], values["target"]
        recalls = [correct[targets == cultivar].float().mean() for cultivar in targets.unique()]
        return {
            "loss": float(values["loss"].mean()),
            "accuracy": float(correct.float().mean()),
            "worst_recall": float(min(recalls)),
        }
