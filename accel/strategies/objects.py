"""The objects that a run trains, in the order they were prepared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Objects:
    """The objects given to `prepare`, by kind; strategies replace entries by their wrapped form.

    `custom` are objects registered for checkpointing.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def extend(self, other: Objects) -> None:
        """Append what `other` holds, kind by kind."""
        self.models += other.models
        self.optimizers += other.optimizers
        self.schedulers += other.schedulers
        self.dataloaders += other.dataloaders
        self.custom += other.custom

    def clear_prepared(self) -> None:
        """Forget the prepared objects; those registered for checkpointing stay."""
        for kind in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kind.clear()
