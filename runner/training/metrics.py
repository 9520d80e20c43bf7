"""Values of training steps, kept on the device until a log point reads them; and a stopwatch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accel.machine.errors import AccelError, CheckpointError, Problem

if TYPE_CHECKING:
    from accel.comm.base import Communicator


class NonFiniteError(AccelError, ArithmeticError):
    """A value of a training step is infinite or not a number."""


class StepMeter:
    """Values per optimizer step; one reduction over processes and one read per `drain`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._read: dict[str, list[float]] = {}

    def add(self, shares: Mapping[str, torch.Tensor]) -> None:
        """Keep this process's share of each value of one step, 0-d; never waits for the device."""
        for name, share in shares.items():
            self._waiting.setdefault(name, []).append(share.detach())

    def drain(self) -> None:
        """Sum the shares over processes and read them. Every process must call this together."""
        if not self._waiting:
            return
        names = sorted(self._waiting)
        shares = [share.float() for name in names for share in self._waiting[name]]
        values = iter(self._comm.all_reduce(torch.stack(shares), "sum").tolist())
        for name in names:
            count = len(self._waiting[name])
            self._read.setdefault(name, []).extend(next(values) for _ in range(count))
        self._waiting.clear()

    def check(self, step: int) -> None:
        """Raise if a value that was read is not finite; the optimizer step `step` was added last.

        Raises:
            NonFiniteError: naming the first such value and its step.
        """
        for name, values in self._read.items():
            for index, value in enumerate(values):
                if not math.isfinite(value):
                    problem = Problem(
                        f"{name}={value} at step {step - len(values) + 1 + index}",
                        "with trainer.stop_on_nan=true it must be finite",
                        "Lower the learning rate, set trainer.clip_grad_norm=1.0, or find the "
                        "operation with trainer.detect_anomaly=true; to go on regardless, set "
                        "trainer.stop_on_nan=false.",
                    )
                    raise NonFiniteError(str(problem))

    def take(self) -> dict[str, float]:
        """Return the mean of each value over the steps that were read, and forget them.

        Steps whose value is not finite are excluded and counted as ``<name>_nonfinite``.
        """
        means: dict[str, float] = {}
        for name, values in self._read.items():
            finite = [value for value in values if math.isfinite(value)]
            means[name] = math.fsum(finite) / len(finite) if finite else math.nan
            if len(finite) < len(values):
                means[f"{name}_nonfinite"] = float(len(values) - len(finite))
        self._read.clear()
        return means

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last `take`."""
        return not self._waiting and not self._read

    def state_dict(self) -> dict[str, list[float]]:
        """Return the values that the next log point averages, after `drain`."""
        if self._waiting:
            raise CheckpointError("StepMeter.state_dict before drain: values are on the device.")
        return {name: list(values) for name, values in self._read.items()}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Restore a state of `state_dict`."""
        self._waiting.clear()
        self._read = {name: list(values) for name, values in state.items()}


class Stopwatch:
    """Time spent on training, without evaluations and saves."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()
        self._paused = self._paused_in_lap = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._paused += spent
            self._paused_in_lap += spent

    def lap(self) -> float:
        """Return the seconds since the last call, pauses excluded."""
        now = time.perf_counter()
        seconds = now - self._lap - self._paused_in_lap
        self._lap, self._paused_in_lap = now, 0.0
        return seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, pauses included."""
        return time.perf_counter() - self._start

    @property
    def training(self) -> float:
        """Seconds since the beginning, pauses excluded."""
        return self.elapsed - self._paused
