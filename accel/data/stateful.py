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
    """Gives the state after the batch in hand, though one more is already fetched.

    Its state is torchdata's ("position"; {} between passes) with the order of the samples
    ("order", as of `PreparedLoader.order_state`), without which a position means nothing.
    """

    _states: tuple[dict[str, Any], dict[str, Any]] | None = None

    def _followed(self, units: Iterator[Any]) -> Iterator[Any]:
        after: dict[str, Any] = {}
        for unit in units:
            before, after = after, super().state_dict()
            self._states = before, after
            yield unit
        self._states = after, after

    def _complete(self, current: Any) -> None:
        super()._complete(current)
        self._states = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new loader goes on with the batch after the one in hand.

        With the last batch in hand, and between passes, that is the start of the next pass.
        """
        order = self.order_state()
        return {"order": order, "position": self._position(order["order"]["pass"])}

    def _position(self, kind: str) -> dict[str, Any]:
        if self._states is not None and kind in ("under way", "left"):
            return self._states[0]
        if self.next_iter_state is not None:  # loaded, and not begun
            return self.next_iter_state
        keeps = hasattr(self.dataset, "state_dict") and self._iterator is not None
        if keeps and (self.num_workers == 0 or self.persistent_workers):
            return super().state_dict()  # the data set counts on from pass to pass
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on from where `state_dict` was taken."""
        self._states = None
        order = state_dict.get("order")
        if order is None:  # torchdata's alone, of an earlier version
            super().load_state_dict(state_dict)
            return
        self.load_order_state(order)
        self._order.resume()
        super().load_state_dict(state_dict["position"])


class StatefulDataLoaderShard(_Tracked, DataLoaderShard):
    """A `DataLoaderShard` that is a `StatefulDataLoader`."""


class StatefulDataLoaderDispatcher(_Tracked, DataLoaderDispatcher):
    """A `DataLoaderDispatcher` that is stateful; only the main process has a state.

    The state does not hold the first samples of a stream's pass: after a resume in mid-pass, a
    short last round is completed with samples from where reading went on.
    """

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
