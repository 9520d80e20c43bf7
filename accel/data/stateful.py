"""What makes a loader torchdata's `StatefulDataLoader`; imported only with torchdata.

`loaders.stateful_class` puts these classes below its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from accel.data.dispatch import RoundReader
from accel.data.order import Pass
from accel.data.pass_tracking import PreparedLoader
from accel.state import PartialState

T = TypeVar("T")


class Tracked(PreparedLoader, StatefulDataLoader):
    """Gives the state after the batch in hand, though one more is prefetched.

    Its state has torchdata's keys, and under "accel" the entries that a position means nothing
    without: "order" of the samples (as of `PreparedLoader.order_state`), "skipped" (entries of the
    sampler that the pass had skipped), "rounds" before it of a dispatched pass, and "behind".
    Copies that `skip_first_batches` returns share it.

    A pass continues from torchdata's position where that knows the place in the data. Torchdata
    counts skipped batches twice when it resumes a stream without a state, and workers that handed
    over what they had left have no place any more. Then "position" under "accel" is the last one
    that had a place, {} for the start, and "behind" is the number of batches since: they are read
    again.
    """

    _before: dict[str, Any]  # the last position that knows its place in the data
    _loaded: dict[str, Any]  # the states of workers that this pass has begun with
    _served: set[str]  # the workers of which it has had a batch since

    def _followed(self, units: Iterator[T]) -> Iterator[T]:
        order = self._order
        after: dict[str, object] = {}
        for unit in units:
            before, after = after, self._noted()
            order.states = before, after
            yield unit
        order.states = after, after

    def _noted(self) -> dict[str, object]:
        shown = self._completed(super().state_dict())
        if not self._rests and self._has_place(shown):
            self._before, self._behind = shown, 0
        else:
            self._behind += 1
        return {
            "shown": shown,
            "position": self._before,
            "behind": self._behind,
            "skipped": self._skipped_now,
        }

    def _completed(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return a position in which a worker without a batch so far has the state it was given.

        A data set may know a state that it was given only once it is read, as Hugging Face's do.
        """
        for worker, state in self._loaded.items():
            if worker not in self._served:
                position["_snapshot"]["_worker_snapshots"][worker] = state
        return position

    def _batches(self, skipped: int = 0) -> Iterator[object]:
        batches = super()._batches(skipped)
        return self._observed(batches) if self._loaded else batches

    def _observed(self, batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            self._served.add(f"worker_{getattr(self._iterator, '_last_yielded_worker_id', None)}")
            yield batch

    def _has_place(self, position: dict[str, Any]) -> bool:
        """Return whether a position of torchdata knows its place in the data."""
        if not isinstance(self.dataset, IterableDataset):
            return True
        workers = position.get("_snapshot", {}).get("_worker_snapshots", {"": position}).values()
        return any(
            one["dataset_state"] is not None
            or (one.get("fetcher_state") or {}).get("dataset_iter_state") is not None
            for one in workers
        )

    def _complete(self, current: Pass) -> None:
        super()._complete(current)
        self._order.states = None

    def _position(self) -> dict[str, Any]:
        order = self._order
        found, order.position = order.position, None
        self._skipped_now, self.next_iter_state = self._skipped, None
        self._before, self._behind, self._rests = {}, 0, []
        self._loaded, self._served = {}, set()
        if not found or (self._resumes and order.loaded_into != self._skips):
            return {}  # the caller chose what to skip
        self._skipped_now = found.get("skipped", self._skipped)
        self._before = found["position"]
        super().load_state_dict(self._before)
        if not found.get("behind"):
            self._loaded = self._before.get("_snapshot", {}).get("_worker_snapshots", {})
        return found if self._before or found.get("behind") else {}

    @property
    def _skips(self) -> tuple[int, int]:
        return self._skipped, self.skip_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new loader continues after the batch in hand.

        With the last batch in hand, and between passes, that is the start of the next pass.
        """
        order = self.order_state()
        found = dict(self._reached(order["order"]["pass"]))
        shown: dict[str, Any] = found.pop("shown", {})
        if found.get("position") is shown:
            del found["position"]
        return {**shown, "accel": {**found, "order": order}}

    def _reached(self, kind: str) -> dict[str, Any]:
        order = self._order
        if order.states is not None and kind in ("under way", "left"):
            return order.states[0]
        if order.position is not None:  # loaded, and not begun
            return order.position
        shown = {} if self._iterator is None else super().state_dict()
        keeps = hasattr(self.dataset, "state_dict") and self._iterator is not None
        if keeps and (self.num_workers == 0 or self.persistent_workers):
            return {"shown": shown, "position": shown}  # the data set counts on from pass to pass
        return {"shown": shown, "position": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue from where `state_dict` was taken."""
        shown = {name: value for name, value in state_dict.items() if name != "accel"}
        found = {"position": shown, **state_dict.get("accel", {}), "shown": shown}
        order = found.pop("order", None)
        if order is not None:  # else it is torchdata's alone
            self.load_order_state(order)
            self._order.resume()
        self._iterator = None
        self._order.states = None
        self._order.position, self._order.loaded_into = found, self._skips


class TrackedOnMain(Tracked):
    """A `Tracked` loader that only the main process reads; only it has a state."""

    _reader: RoundReader

    def _noted(self) -> dict[str, object]:
        return {**super()._noted(), "rounds": self._reader.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the main process, {} on the others."""
        return super().state_dict() if PartialState().is_main_process else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the main process continue from where `state_dict` was taken."""
        if PartialState().is_main_process:
            super().load_state_dict(state_dict)
