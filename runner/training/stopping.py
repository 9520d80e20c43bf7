"""Requests to stop: a signal sets a flag, and all processes act on it at the same step boundary.

SIGTERM and SIGUSR1 (sent by schedulers before they take a machine away) mean: save and stop. Their
handlers only set a flag. Ranks receive them at different steps, and a rank that left the loop by
itself would leave the others waiting in a collective forever. So rank 0 decides, and the others
follow:

* A *boundary* is a call of `StopFlag.agreed`. Every process makes the same calls in the same order.
* At some boundaries, the same ones on all processes, rank 0 writes its decision and the number of
  the next such boundary to the store of the rendezvous; the others read it. This is a message on
  the host, not a collective: nothing waits for a device, and rank 0 waits for nobody.
* These boundaries lie about `INTERVAL_SECONDS` apart, so that the cost per step vanishes, and never
  more than `MAX_INTERVAL` boundaries, so that a loop that becomes slow still hears of a signal.

Free of torch at import.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner.runs.json_files import TIME_IS_UP

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel import Accelerator

REPLACEABLE = ("", TIME_IS_UP)  # reasons after which a signal still counts
INTERVAL_SECONDS = 0.25
MAX_INTERVAL = 64
# Decisions are removed once so many newer ones exist. Rank 0 is ahead of the others by far fewer:
# it waits for them in every collective.
KEPT_DECISIONS = 10_000
SECONDS_TO_FAIL = 5.0  # in which ranks of the same code meet the same error

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
HEARD_SIGNALS = (*STOP_SIGNALS, signal.SIGINT)  # all that a run handles
Handler = Callable[[int, FrameType | None], object] | int | None


class StopFlag:
    """Whether a stop of this run was requested; boundaries are counted in `progress`.

    `session` is the folder where a worker reports to its parent; None: the process is on its own.
    """

    def __init__(self, session: Path | None = None) -> None:
        self.session = session
        self.progress = Progress()
        self.seconds = 0.0  # on rank 0's clock, since it started, at the last decision
        self._began = time.monotonic()
        self._requested = ""
        self._decided = ""
        self._interrupted = False
        self._clocks: defaultdict[str, _Clock] = defaultdict(_Clock)
        self._store: Store | None = None

    @property
    def reason(self) -> str:
        """Reason of the stop that all ranks agreed on, e.g. "SIGTERM"; empty: none yet."""
        return self._decided

    def request(self, reason: str) -> None:
        """Ask for a stop at the next boundary. The first reason stays, unless time was up."""
        if self._requested in REPLACEABLE:
            self._requested = reason

    def agreed(self, processes: Accelerator, phase: str = "train") -> bool:
        """Return whether all processes stop here: the same answer on each of them.

        Args:
            processes: the accelerator.
            phase: kind of boundary. Kinds of different duration keep different intervals.

        Raises:
            KeyboardInterrupt: if Ctrl-C raised it before and it was lost, as exceptions in
                destructors are (e.g. of a loader that ends its processes).
        """
        if phase == "train":
            self.progress.step()
        else:
            self.progress.batch()
        if self._interrupted:
            raise KeyboardInterrupt
        if self._decided not in REPLACEABLE:
            return True
        if processes.num_processes == 1:
            self._decided, self.seconds = self._requested, time.monotonic() - self._began
            return bool(self._decided)
        clock = self._clocks[phase]
        clock.tick += 1
        if clock.tick < clock.next_tick:
            return False
        self._exchange(processes, phase, clock)
        return bool(self._decided)

    def _exchange(self, processes: Accelerator, phase: str, clock: _Clock) -> None:
        if self._store is None:
            self._store = _stop_store()
        key = f"{phase}/{clock.tick}"
        if processes.process_index == 0:
            if self._requested in REPLACEABLE and self._store.check(["requested"]):
                self._requested = self._store.get("requested").decode()
            self._decided = self._requested
            self.seconds = time.monotonic() - self._began
            clock.advance()
            self._store.set(key, json.dumps([self._decided, clock.next_tick, self.seconds]))
            clock.forget(self._store, key)
            return
        if self._requested:
            self._store.set("requested", self._requested)
        self._decided, clock.next_tick, self.seconds = json.loads(self._store.get(key))

    def all_failed(self, processes: Accelerator, step: int) -> bool:
        """Return whether every process has met an error after optimizer step `step`, as this one.

        They can then still do something together. The others are waited for a few seconds: one that
        is in a collective meanwhile hears of the error only by the end of this process.
        """
        if processes.num_processes == 1:
            return True
        try:
            store = self._store = self._store or _stop_store()
            key = f"failed/{step}"
            if store.add(key, 1) == processes.num_processes:
                store.set(f"{key}/all", "")
            store.wait([f"{key}/all"], timedelta(seconds=SECONDS_TO_FAIL))
        except RuntimeError:  # torch's, of the store: a process is gone, or takes too long
            return False
        return True

    @contextmanager
    def installed(self) -> Iterator[StopFlag]:
        """Listen to the stop signals in the context; handlers found there are called as well."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may have handlers; its owner decides
            return
        with handlers_restored(HEARD_SIGNALS) as before:
            self._install(before)
            yield self

    def _install(self, before: Mapping[signal.Signals, Handler]) -> None:
        owner = os.getpid()

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:
                _in_forked_child(number)
                return
            self.request(signal.Signals(number).name)
            earlier = before[signal.Signals(number)]
            if callable(earlier):
                earlier(number, frame)

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = os.getpid() == owner
            signal.default_int_handler(number, frame)

        for number in STOP_SIGNALS:
            signal.signal(number, handle)
        if before[signal.SIGINT] is signal.default_int_handler:  # not ignored, no debugger's own
            signal.signal(signal.SIGINT, interrupt)


def _in_forked_child(number: int) -> None:
    """Handle a stop signal in a child of a process with our handlers, which has nothing to save.

    SIGTERM ends it, as its parent expects of `Process.terminate`. Schedulers send SIGUSR1 to all
    processes of a job; data loaders ignore it, since training continues to the next boundary.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _Clock:
    """Which boundaries of one kind exchange a decision."""

    def __init__(self) -> None:
        self.tick = 0
        self.next_tick = 1
        self._interval = 1
        self._last = time.monotonic()
        self._keys: list[str] = []

    def advance(self) -> None:
        """Choose the next boundary from the pace since the last one (rank 0)."""
        now = time.monotonic()
        seconds_per_tick = max((now - self._last) / self._interval, 1e-9)
        wanted = int(INTERVAL_SECONDS / seconds_per_tick)
        self._interval = max(1, min(wanted, 2 * self._interval, MAX_INTERVAL))
        self._last = now
        self.next_tick = self.tick + self._interval

    def forget(self, store: Store, key: str) -> None:
        """Remove a decision that every process has read long ago."""
        self._keys.append(key)
        if len(self._keys) > KEPT_DECISIONS:
            store.delete_key(self._keys.pop(0))


def _stop_store() -> Store:
    """Return a connection of our own to the store of the rendezvous."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()  # `clone` is documented, and missing in torch's type stubs
    return PrefixStore("runner/stop", store.clone())


@contextmanager
def signals_blocked(numbers: Sequence[int]) -> Iterator[None]:
    """Hold `numbers` back from this thread; processes that it starts inside hold them back, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handlers_restored(numbers: Iterable[signal.Signals]) -> Iterator[dict[signal.Signals, Handler]]:
    """Restore the handlers of `numbers` after the context, which gets them by signal."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            # None: it was not installed from Python, and cannot be restored from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


START_UP, TRAINING = "start-up", "training"


class Progress:
    """Counts what the main thread has completed; read by another thread.

    Attributes:
        count: boundaries passed: optimizer steps, evaluated batches, phases entered and left.
        steps: optimizer steps made.
        phase: current phase of the main thread.
        is_timed: whether phases have a time limit: from the first step on.
        ending: why training has ended on this rank; empty: it has not.
    """

    def __init__(self) -> None:
        self.count = self.steps = 0
        self.phase = START_UP
        self.is_timed = False
        self.ending = ""

    def step(self) -> None:
        """Say that an optimizer step is complete."""
        self.count += 1
        self.steps += 1
        self.phase = TRAINING
        self.is_timed = True

    def batch(self, *_: object) -> None:
        """Say that a batch was evaluated."""
        self.count += 1

    @contextmanager
    def in_phase(self, phase: str, *, timed: bool = False) -> Iterator[None]:
        """Context of another phase; to enter and to leave it is progress.

        `timed`: phases have a time limit from now on, also without a step.
        """
        before = self.phase
        self.is_timed = self.is_timed or timed
        self.count += 1
        self.phase = phase
        try:
            yield
        finally:
            self.count += 1
            self.phase = before
