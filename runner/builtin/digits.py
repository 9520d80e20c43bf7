"""The default recipe: scikit-learn's 1,797 scanned digits, a small CNN, and classification.

Shapes: B samples, N samples of a split, K variants of a sample, C classes. Images are [1, 8, 8],
float32 in [0, 1].
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from runner.builtin.optimizers import check_ranges
from runner.data.datasets import Data
from runner.training.step import Objective

NUM_CLASSES = 10
TEST_FRACTION = 0.2
VALIDATION_FRACTION = 0.1

# The largest changes that leave a digit of 8 by 8 pixels itself.
MAX_ROTATION = math.radians(12.0)
MAX_SHIFT_PIXELS = 0.9
MAX_ZOOM = 0.1


class RandomVariants(Dataset[tuple[Tensor, Tensor]]):
    """Images of which each visit draws one variant, from Python's generator.

    The variants [K, N, 1, 8, 8] are made once, for all images together: to warp 64 pixels at each
    visit costs more than a training step. Labels are [N] int64.
    """

    def __init__(self, variants: Tensor, labels: Tensor) -> None:
        self.variants = variants
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        variant = random.randrange(len(self.variants))
        return self.variants[variant, index], self.labels[index]


def digits(augment: bool = True, num_variants: int = 32, split_seed: int = 0) -> Data:
    """Return the scanned digits in a fixed split: 1,257 train, 180 validation, 360 test.

    A sample is ``(image [1, 8, 8] float32 in [0, 1], label [] int64)``. The data lie in the
    scikit-learn package; nothing is downloaded. Each split holds the classes in equal proportion.

    Args:
        augment: whether a training image is drawn at random among slightly rotated, shifted and
            scaled variants of itself (the original is one of them).
        num_variants: how many variants each training image has.
        split_seed: seed of the split and of the variants; the run's seed changes neither.

    Raises:
        ConfigError: if `num_variants` is less than 1.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository.
    """
    check_ranges("data", num_variants=(num_variants, 1, math.inf))
    images, labels, parts = _load_split(split_seed)
    train, validation, test = (TensorDataset(images[part], labels[part]) for part in parts)
    if not augment:
        return Data(train, validation, test)
    generator = torch.Generator().manual_seed(split_seed)
    originals = images[parts[0]]
    variants = [originals, *(warp(originals, generator) for _ in range(num_variants - 1))]
    return Data(RandomVariants(torch.stack(variants), labels[parts[0]]), validation, test)


def _load_split(seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return images [N, 1, 8, 8], labels [N] and the indices of train, validation and test."""
    # scikit-learn takes a second to import, which only this data set is to pay.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32) / 16.0).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    everything = np.arange(len(labels))
    rest, test = train_test_split(
        everything, test_size=TEST_FRACTION, stratify=bunch.target, random_state=seed
    )
    train, validation = train_test_split(
        rest,
        test_size=VALIDATION_FRACTION / (1 - TEST_FRACTION),
        stratify=bunch.target[rest],
        random_state=seed,
    )
    return images, labels, [torch.from_numpy(np.sort(part)) for part in (train, validation, test)]


def warp(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image rotated, scaled and shifted by amounts drawn from a generator of the CPU.

    Images are [N, 1, H, W]; the sampling is bilinear, and zero outside the image.
    """
    count, _, _, width = images.shape

    def draw(largest: float) -> Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * largest

    angle, zoom = draw(MAX_ROTATION), 1 + draw(MAX_ZOOM)
    # affine_grid measures in half widths of the image.
    shift_x, shift_y = (draw(MAX_SHIFT_PIXELS * 2 / width) for _ in range(2))
    cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    rows = torch.stack((cos, -sin, shift_x, sin, cos, shift_y), dim=1)
    grid = F.affine_grid(rows.view(count, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


class CNN(nn.Module):
    """Three convolutions and a linear layer; for the arguments see `cnn`.

    There is no batch normalisation: a result must not depend on how processes share a batch.
    """

    def __init__(self, width: int, dropout: float, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width * 4 * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 1, 8, 8]."""
        return self.head(self.dropout(self.features(images).flatten(1)))


def cnn(width: int = 32, dropout: float = 0.1, num_classes: int = NUM_CLASSES) -> nn.Module:
    """Return the small CNN: 38 thousand parameters at the default width.

    Args:
        width: channels of the first two convolutions; the third has twice as many.
        dropout: probability that a feature is dropped before the last layer.
        num_classes: number of classes.

    Raises:
        ConfigError: naming every argument that is out of its range.
    """
    check_ranges(
        "model",
        width=(width, 1, math.inf),
        dropout=(dropout, 0, 1),
        num_classes=(num_classes, 1, math.inf),
    )
    return CNN(width, dropout, num_classes)


class Classification(Objective):
    """Cross-entropy of samples ``(input, label)``, whatever the model: logits [B, C].

    States are compared by the loss: on a small data set many reach the same accuracy, and the first
    of them is not the best.

    Args:
        label_smoothing: share of the target distributed evenly over all classes, in training and
            evaluation alike.

    Raises:
        ConfigError: if `label_smoothing` is not from 0 to 1.
    """

    monitor = "loss"
    mode = "min"

    def __init__(self, label_smoothing: float = 0.0) -> None:
        check_ranges("objective", label_smoothing=(label_smoothing, 0, 1))
        self.label_smoothing = label_smoothing

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy of each sample, in nats: [B]."""
        inputs, labels = batch
        return self._cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        """Return loss, weight and whether the likeliest class is right: each [B]."""
        inputs, labels = batch
        logits = model(inputs)
        losses = self._cross_entropy(logits, labels)
        return {
            "loss": losses,
            "weight": torch.ones_like(losses),
            "correct": logits.argmax(dim=1) == labels,
        }

    def summarize(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean loss in nats and the accuracy in [0, 1]."""
        return super().summarize(values) | {"accuracy": float(values["correct"].double().mean())}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the likeliest class [B] and the probability of each [B, C]."""
        probabilities = torch.softmax(model(batch[0]).float(), dim=1)
        return {"prediction": probabilities.argmax(dim=1), "probabilities": probabilities}

    def metric_inputs(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the probability of each class [B, C], and the labels [B]."""
        return torch.softmax(output.float(), dim=1), batch[1]

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.float(), labels, reduction="none", label_smoothing=self.label_smoothing
        )
