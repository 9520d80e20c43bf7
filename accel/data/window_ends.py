"""Which micro-batch is the last of the loader that a training loop is driven by.

Loops fetch batches in many ways: several ahead of their micro-batches, from loaders side by side
(``zip``), from loaders within loops over others. The counts kept here, while gradients are
accumulated, show where the pass of the loop's own loader ends, and that it ends once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch


class Reading:
    """One pass over a loader, and how many of its batches wait for their micro-batch.

    That is the batches given less the micro-batches taken. A loop that took the first batch of the
    pass before it fetched the second takes batches one by one: those that it fetches on over, it
    skips.

    Attributes:
        started: when the pass gave its first batch.
        fetched: when it gave its latest; 0 before.
        waiting: the batches that wait for their micro-batch.
        beside: loaders that were being read when this one gave a batch: none of them is read
            within a loop over this one.
        is_gathered: whether metrics were gathered while its last batch was in hand.
    """

    def __init__(self) -> None:
        self.is_gathered = False
        self.started = self.fetched = self.waiting = 0
        self.beside: weakref.WeakSet[object] = weakref.WeakSet()
        self._burst = self._taken = 0  # batches, then micro-batches, in a row
        # Micro-batches per batch of a loop that takes one by one; 0: of one that fetches ahead.
        self._usual: int | None = None

    def give(self, now: int) -> None:
        """Note that the pass gives a batch at the time `now`."""
        self.started = self.started or now
        self.fetched = now
        if self._taken:
            if self._usual is None:
                self._usual = self._taken if self._burst == 1 else 0
            self._burst = self._taken = 0
        self._burst += 1
        self.waiting += 1

    def take(self) -> bool:
        """Note a micro-batch; return whether it shows that batches were not skipped after all."""
        self._taken += 1
        self.waiting = max(0, self.waiting - 1)
        if not self._usual or self._burst == 1:
            return False
        if self._taken <= self._usual:
            self.waiting = 0
            return False
        self._usual, self.waiting = 0, max(0, self._burst - self._taken)
        return True


class Reader:
    """The loaders that a loop reads, and the one that drives it.

    A loop is driven by the loader that is read within it, or by the first one where several are
    read side by side: the end of its pass ends the last window.

    The methods take `reading`, the loaders whose passes are under way, the outermost first, and
    `is_open`, whether a window of micro-batches is.
    """

    def __init__(self) -> None:
        self._now = 0
        self._block = 0  # when the latest micro-batch began
        self._was_last = False  # whether it was the last of its pass
        self._driver: Reading | None = None
        self._confirmed = False
        self._late = 0  # batches that wait for a micro-batch though their pass has ended
        self._ended: weakref.ref[object] | None = None  # the loader of that pass
        self._beside: weakref.WeakSet[object] = weakref.WeakSet()  # loaders read beside it
        self._ended_at = 0
        self._undriven = False  # whether the latest micro-batch came of no prepared loader
        self._proven = False  # whether micro-batches of it are known
        self._other_ended = 0  # when a pass that does not drive the loop ended

    def give(self, loader: Any, reading: Sequence[Any], is_open: bool) -> None:
        """Note that `loader`, one of `reading`, gives a batch."""
        if self._late and loader.reading.fetched == 0 and self._is_ended(loader):
            self._late, late = 0, self._late
            if is_open and self._proven:
                warnings.warn(
                    f"{late} batches of the last pass came to no accumulate() block, so its last "
                    "window of micro-batches is still open. Enter a block for every batch; leave "
                    "out the first ones of a pass with skip_first_batches().",
                    stacklevel=4,
                )
        self._now += 1
        for other in reading:
            if other is not loader:
                loader.reading.beside.add(other)
        loader.reading.give(self._now)

    def take(self, reading: Sequence[Any], is_counted: bool) -> bool:
        """Note a micro-batch; return whether it is the last of the pass that drives the loop.

        Unless `is_counted`, the caller says where windows end.
        """
        passes = {id(one): one for one in reading if getattr(one, "reading", None) is not None}
        fetched = sorted(passes.values(), key=lambda loader: loader.reading.fetched)
        self._choose([loader for loader in fetched if loader.reading.fetched > self._block])
        self._now += 1
        self._block = self._now
        for loader in fetched:
            if loader.reading.take() and loader.reading is self._driver and self._was_last:
                warnings.warn(
                    "Batches that were fetched ahead were taken for skipped ones, since the loop "
                    "took the first batch of the pass alone: its last window of micro-batches "
                    "ended too early. Give accumulate(sync_gradients=...) where windows end.",
                    stacklevel=6,
                )
        is_last = self._is_last(reading, fetched)
        self._was_last = is_last and is_counted
        return is_last

    def _is_last(self, reading: Sequence[Any], fetched: Sequence[Any]) -> bool:
        if self._late and any(self._follows_the_ended(one) for one in fetched):
            self._late = 0
        self._undriven = not self._late and not reading
        if self._late:
            self._proven = True
            self._late -= 1
            return self._late == 0
        if not reading:
            return False
        driver = next((one for one in fetched if one.reading is self._driver), reading[-1])
        waits = any(one is driver and one.reading.waiting for one in fetched)
        return bool(driver.end_of_dataloader) and not waits

    def _is_ended(self, loader: object) -> bool:
        return self._ended is not None and self._ended() is loader

    def _follows_the_ended(self, loader: Any) -> bool:
        """Return whether a loop over `loader` came after the pass whose batches wait."""
        return loader.reading.started > self._ended_at and loader not in self._beside

    def leave(self, loader: Any, reading: Sequence[Any], is_open: bool) -> None:
        """Note that the pass over `loader`, one of `reading`, ends; micro-batches may follow."""
        drives = self._driver is not None and loader.reading is self._driver
        if loader.end_of_dataloader and (drives or self._may_drive(loader, reading)):
            self._late, self._ended = loader.reading.waiting, weakref.ref(loader)
            self._beside, self._ended_at = loader.reading.beside, self._now
            self._proven = drives
        elif loader.end_of_dataloader:
            self._other_ended = self._now
        elif drives and is_open and self._other_ended > self._block:
            warnings.warn(
                "A loader that is read beside the first one, as in zip(train, other), ended before "
                "it and within a window of micro-batches, which the next pass goes on with. Give "
                "zip() the shorter loader first, or repeat it.",
                stacklevel=4,
            )
        if drives:
            self._driver, self._confirmed = None, False

    def _may_drive(self, loader: object, reading: Sequence[object]) -> bool:
        """Return whether micro-batches may come of a pass that ended before the first of them.

        Not of an evaluation: gradients are disabled, or a training pass is under way or unfinished,
        or micro-batches come of a loader that is not prepared.
        """
        if self._undriven or self._driver is not None or (self._late and self._proven):
            return False
        return torch.is_grad_enabled() and all(other is loader for other in reading)

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
