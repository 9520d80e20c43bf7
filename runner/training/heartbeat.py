"""How far this process has come, as its watchdog sees it. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

START_UP = "start-up"


class Progress:
    """Counts what the main thread has completed; read by another thread.

    Attributes:
        count: boundaries passed: optimizer steps, evaluated batches, phases entered and left.
        phase: current phase of the main thread.
        is_slow: whether the phase has no time limit: start-up with the first step,
            evaluation, saving, the end.
        ending: why training has ended on this rank; empty: it has not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.phase = START_UP
        self.is_slow = True
        self.ending = ""

    def step(self) -> None:
        """Say that an optimizer step is complete; from the first one on, steps are timed."""
        self.count += 1
        self.phase = "training"
        self.is_slow = False

    def batch(self) -> None:
        """Say that a batch was evaluated."""
        self.count += 1

    @contextmanager
    def slow_phase(self, phase: str) -> Iterator[None]:
        """Context of a phase without a time limit."""
        before = self.phase, self.is_slow
        self.count += 1
        self.phase, self.is_slow = phase, True
        try:
            yield
        finally:
            self.count += 1
            self.phase, self.is_slow = before
