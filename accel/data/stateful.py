"""Prepared loaders that are torchdata's `StatefulDataLoader`; imported only with torchdata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from accel.data.base import PreparedLoader
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accel.state import PartialState


class _Tracked(PreparedLoader, StatefulDataLoader):
    """Gives the state after the batch in hand, though one more is already fetched."""

    _states: tuple[dict[str, Any], dict[str, Any]] | None = None

    def _followed(self, units: Iterator[Any]) -> Iterator[Any]:
        after: dict[str, Any] = {}
        for unit in units:
            before, after = after, super().state_dict()
            self._states = before, after
            yield unit
        self._states = after, after

    def _complete(self, epoch: int) -> None:
        super()._complete(epoch)
        self._states = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new loader goes on with the batch after the one in hand."""
        return super().state_dict() if self._states is None else self._states[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on from where `state_dict` was taken."""
        self._states = None
        super().load_state_dict(state_dict)


class StatefulDataLoaderShard(_Tracked, DataLoaderShard):
    """A `DataLoaderShard` that is a `StatefulDataLoader`."""


class StatefulDataLoaderDispatcher(_Tracked, DataLoaderDispatcher):
    """A `DataLoaderDispatcher` that is stateful; only the main process has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the main process, {} on the others."""
        return super().state_dict() if PartialState().is_main_process else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the main process go on from where `state_dict` was taken."""
        if PartialState().is_main_process:
            super().load_state_dict(state_dict)


class StatefulSkipDataLoader(SkipDataLoader, StatefulDataLoader):
    """A `SkipDataLoader` that is a `StatefulDataLoader`."""


VARIANTS: dict[type[DataLoader[Any]], type[DataLoader[Any]]] = {
    DataLoaderShard: StatefulDataLoaderShard,
    DataLoaderDispatcher: StatefulDataLoaderDispatcher,
    SkipDataLoader: StatefulSkipDataLoader,
}
