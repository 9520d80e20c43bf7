"""Data sets of a recipe, and an order that is a function of (seed, epoch, step) alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset


@dataclass
class Data:
    """What a data factory returns.

    Args:
        train: what is trained on (a map-style data set, or an iterable one).
        validation: what is evaluated during training and decides which state is best.
        test: what is evaluated once at the end, with the best weights.
        collate_fn: joins samples into a batch; None: torch's default.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
