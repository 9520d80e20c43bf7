"""Which micro-batch is the last of the loader that a training loop is driven by.

Loops fetch batches in many ways: several ahead of their micro-batches, from loaders side by side
(``zip``), from loaders within loops over others. What is noted here, while gradients are
accumulated, tells where the pass of the loop's own loader ends, and that it ends once.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from accel.tree import iterate


class Reading:
    """One pass over a loader: which of its batches wait for their micro-batch.

    Attributes:
        started: when the pass gave its first batch.
        fetched: when it gave its latest; 0 before.
        beside: loaders that were being read when this one gave a batch: none of them is read
            within a loop over this one.
    """

    def __init__(self) -> None:
        self.started = self.fetched = 0
        self.beside: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: deque[list[weakref.ref[Any]]] = deque()
        self._burst = self._taken = 0  # batches, then micro-batches, in a row
        self._keeps = False  # whether batches that were fetched together are trained one by one

    @property
    def waiting(self) -> int:
        """The batches that were fetched ahead and wait for their micro-batch."""
        if not self._keeps:
            self._drop_unused()
        return len(self._waiting)

    def give(self, batch: Any, now: int) -> None:
        """Note that the pass gives a batch at the time `now`."""
        self.started = self.started or now
        self.fetched = now
        if self._taken:
            self._drop_unused()
            self._burst = self._taken = 0
        self._burst += 1
        self._waiting.append([weakref.ref(tensor) for tensor in iterate(batch)])

    def take(self) -> None:
        """Note a micro-batch: of the first batch that waits."""
        self._keeps = self._keeps or 0 < self._taken < self._burst
        self._taken += 1
        if self.waiting:
            self._waiting.popleft()

    def _drop_unused(self) -> None:
        """Forget batches that the loop let go of: it skipped them."""
        alive = [refs for refs in self._waiting if any(ref() is not None for ref in refs)]
        self._waiting = deque(alive)


class Reader:
    """The loaders that a loop reads, and the one that drives it.

    A loop is driven by the loader that is read within it, or by the first one where several are
    read side by side: the end of its pass ends the last window.
    """

    def __init__(self) -> None:
        self._now = 0
        self._block = 0  # when the latest micro-batch began
        self._driver: Reading | None = None
        self._confirmed = False
        self._late = 0  # batches that wait for a micro-batch though their pass has ended
        self._ended: weakref.ref[Any] | None = None  # the loader of that pass
        self._other_ended = 0  # when a pass that does not drive the loop ended

    def give(self, loader: Any, batch: Any, reading: Sequence[Any], is_open: bool) -> None:
        """Note that a loader gives a batch.

        Args:
            loader: one of `reading`.
            batch: nested tensors.
            reading: the loaders whose passes are under way, the outermost first.
            is_open: whether a window of micro-batches is.
        """
        if self._late and loader.reading.fetched == 0:
            self._late, late = 0, self._late
            if is_open and self._ended is not None and self._ended() is loader:
                warnings.warn(
                    f"{late} batches of the last pass came to no accumulate() block, so its last "
                    "window of micro-batches is still open. Enter a block for every batch, or let "
                    "go of batches that are skipped.",
                    stacklevel=4,
                )
        self._now += 1
        for other in reading:
            if other is not loader:
                loader.reading.beside.add(other)
        loader.reading.give(batch, self._now)

    def take(self, reading: Sequence[Any]) -> bool:
        """Note a micro-batch; return whether it is the last of the pass that drives the loop."""
        passes = {id(one): one for one in reading if getattr(one, "reading", None) is not None}
        fetched = sorted(passes.values(), key=lambda loader: loader.reading.fetched)
        self._choose([loader for loader in fetched if loader.reading.fetched > self._block])
        self._now += 1
        self._block = self._now
        for loader in fetched:
            loader.reading.take()
        if self._late:
            self._late -= 1
            return self._late == 0
        if not reading:
            return False
        driver = next((one for one in fetched if one.reading is self._driver), reading[-1])
        is_last = not any(one is driver and one.reading.waiting for one in fetched)
        return is_last and bool(driver.end_of_dataloader)

    def leave(self, loader: Any, is_open: bool) -> None:
        """Note that a pass ends, though micro-batches of it may follow.

        Args:
            loader: what is read.
            is_open: whether a window of micro-batches is.
        """
        drives = self._driver is not None and loader.reading is self._driver
        if loader.end_of_dataloader and drives:
            self._late, self._ended = loader.reading.waiting, weakref.ref(loader)
        elif loader.end_of_dataloader:
            self._other_ended = self._now
        elif drives and is_open and self._other_ended > self._block:
            warnings.warn(
                "A loader that is read beside the first one, as in zip(train, other), ended before "
                "it and within a window of micro-batches, which the next pass goes on with. Give "
                "zip() the shorter loader first, or repeat it.",
                stacklevel=4,
            )

    def _choose(self, fresh: Sequence[Any]) -> None:
        """Choose what drives the loop among what gave batches since the latest micro-batch."""
        if not fresh or (self._confirmed and any(one.reading is self._driver for one in fresh)):
            return
        first, *others = fresh
        within = [
            other
            for other in others
            if other.reading.started > first.reading.fetched and other not in first.reading.beside
        ]
        self._confirmed = not within  # one that is read beside the first is seen at the next batch
        self._driver = (within[-1] if within else first).reading
