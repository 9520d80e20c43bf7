"""When gradients are synchronized, and parameters stay gathered in between."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch.distributed.fsdp import FSDPModule

from accel.machine.errors import ConfigError
from accel.strategies.base import Sync
from accel.strategies.mesh.torch_internals import Resharding, keep_unsharded, restore_resharding


class MeshSync(Sync):
    """Gradient synchronization of FSDP units."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsynced: Counter[int] = Counter()  # by id of a model: `no_sync` contexts around
        self._resharding: dict[int, Resharding] = {}  # by id of a model that does not synchronize

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce no gradients in backward passes inside, and keep parameters gathered."""
        self._unsynced[id(model)] += 1
        self._set(model, False)
        try:
            yield
        finally:
            self._unsynced[id(model)] -= 1
            self._set(model, self._unsynced[id(model)] <= 0)

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce all accumulated gradients in the next backward, after forwards in `no_sync`."""
        self._set(model, True)
        try:
            yield
        finally:
            self._set(model, self._unsynced[id(model)] <= 0)

    def reduces(self, model: torch.nn.Module) -> bool:
        """Return whether backward passes through `model` reduce gradients now."""
        return id(model) not in self._resharding

    def _set(self, model: torch.nn.Module, sync: bool) -> None:
        if not isinstance(model, FSDPModule):
            return
        model.set_requires_gradient_sync(sync)
        model.set_reshard_after_backward(sync)
        if sync:
            restore_resharding(self._resharding.pop(id(model), []))
        elif id(model) not in self._resharding:
            self._resharding[id(model)] = keep_unsharded(model)

    def join(self, joinables: Sequence[object]) -> NoReturn:
        """Refuse: every rank takes part in each all-gather."""
        raise ConfigError.of(
            f"join_uneven_inputs with {self._name}",
            "each forward pass gathers parameters from all ranks",
            "Let loaders complete the last batch: even_batches=True.",
        )
