"""What makes a loader torchdata's `StatefulDataLoader`; imported only with torchdata.

`loaders.stateful_class` puts these classes below its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torchdata.stateful_dataloader import StatefulDataLoader

from accel.data.dispatch_rounds import RoundReader
from accel.data.open_pass import Pass
from accel.data.pass_tracking import PreparedLoader
from accel.state import PartialState

T = TypeVar("T")


class Tracked(PreparedLoader, StatefulDataLoader):
    """Gives the state after the batch in hand, though one more is prefetched.

    Its state is torchdata's ("position"; {} at the start of a pass) with what a position means
    nothing without: the order of the samples ("order", as of `PreparedLoader.order_state`), how
    many entries of the sampler the pass had skipped ("skipped"), and the rounds before it of a
    dispatched pass ("rounds"). Copies that `skip_first_batches` returns share it. Torchdata's
    position is that of all workers before one handed over what it had left, and how many batches
    were given since is counted ("behind"): they are read again, and what was left with them.
    """

    _before: dict[str, object]  # the position before workers handed over what they had left
    _behind = 0  # batches given since

    def _followed(self, units: Iterator[T]) -> Iterator[T]:
        order = self._order
        after: dict[str, object] = {}
        for unit in units:
            before, after = after, self._noted()
            order.states = before, after
            yield unit
        order.states = after, after

    def _noted(self) -> dict[str, object]:
        noted: dict[str, object] = {"skipped": self._skipped_now}
        if self._rests:
            self._behind += 1
            noted["behind"] = self._behind
        else:
            self._before = super().state_dict()
        return {"position": self._before, **noted}

    def _complete(self, current: Pass) -> None:
        super()._complete(current)
        self._order.states = None

    def _position(self) -> dict[str, Any]:
        order = self._order
        found, order.position = order.position, None
        self._skipped_now, self.next_iter_state = self._skipped, None
        self._before, self._behind, self._rests = {}, 0, []
        if not found or (self._resumes and order.loaded_into != self._skips):
            return {}  # the caller chose what to skip
        self._skipped_now = found.get("skipped", self._skipped)
        self._before = found["position"]
        super().load_state_dict(self._before)
        return found if self._before or found.get("behind") else {}

    @property
    def _skips(self) -> tuple[int, int]:
        return self._skipped, self.skip_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new loader continues after the batch in hand.

        With the last batch in hand, and between passes, that is the start of the next pass.
        """
        order = self.order_state()
        return {"position": {}, **self._reached(order["order"]["pass"]), "order": order}

    def _reached(self, kind: str) -> dict[str, object]:
        order = self._order
        if order.states is not None and kind in ("under way", "left"):
            return order.states[0]
        if order.position is not None:  # loaded, and not begun
            return order.position
        keeps = hasattr(self.dataset, "state_dict") and self._iterator is not None
        if keeps and (self.num_workers == 0 or self.persistent_workers):
            return {"position": super().state_dict()}  # the data set counts on from pass to pass
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue from where `state_dict` was taken."""
        found = dict(state_dict)
        order = found.pop("order", None)
        if order is None:  # torchdata's only, of an earlier version
            found = {"position": state_dict}
        else:
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
