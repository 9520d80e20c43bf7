"""Counters of a run, its end and its clock.

Free of torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from accel.machine.errors import ConfigError

PRUNED = "pruned"  # why a trial of a study ended before its time
PAUSES = ("start", "evaluation", "saving", "callbacks")  # phases in which a run does not train
PHASES = ("start", "data", "forward_backward", "optimizer", "evaluation", "saving", "callbacks")


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether `value` improves on `best`; NaN never does, any number improves on None.

    `mode` is "max" or "min"; a change must exceed `min_delta` to count.
    """
    if math.isnan(value):
        return False
    if best is None:
        return True
    return (value - best if mode == "max" else best - value) > min_delta


@dataclass
class TrainState:
    """Counters that every process agrees on.

    Attributes:
        step: optimizer steps made.
        epoch: epochs completed.
        samples: samples trained on, over all processes and epochs.
        tokens: items that the losses read so far sum over (`Objective.weights`), likewise; 0 where
            each sample is one.
        step_in_epoch: optimizer steps made in the epoch under way.
        samples_in_epoch: samples trained on in the epoch under way: the position in its order,
            whatever the number of processes.
        evaluated_step: the step at which the validation data was last evaluated; -1: never.
        top: [value, step] of the best evaluated states so far, the best first.
        seconds: time spent on the run, over all invocations.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    step_in_epoch: int = 0
    samples_in_epoch: int = 0
    evaluated_step: int = -1
    top: list[list[Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> float | None:
        """Best value of the monitored metric so far."""
        return self.top[0][0] if self.top else None

    @property
    def best_step(self) -> int | None:
        """The step that reached it."""
        return self.top[0][1] if self.top else None

    def rank(self, value: float, mode: str, size: int) -> bool:
        """Enter the value of the present step into the best `size`; return whether it is there.

        `mode` is "max" or "min". Of equal values the earlier one is the better.
        """
        place = sum(not is_better(value, other, mode) for other, _ in self.top)
        if math.isnan(value) or place >= size:
            return False
        self.top.insert(place, [value, self.step])
        del self.top[size:]
        return True

    @property
    def epoch_number(self) -> int:
        """The epoch that the last step belongs to, counted from 1; 0 before the first step."""
        return self.epoch + (self.step_in_epoch > 0)

    def advance(self, num_samples: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.step_in_epoch += 1
        self.samples += num_samples
        self.samples_in_epoch += num_samples

    def end_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.samples_in_epoch = 0

    def move_to(self, global_batch: int) -> None:
        """Express the position in steps of `global_batch` samples, after a resume.

        Raises:
            ConfigError: if the position lies within such a step.
        """
        if self.step_in_epoch == 0:
            return
        steps, rest = divmod(self.samples_in_epoch, global_batch)
        if rest:
            raise ConfigError.of(
                f"trainer.global_batch_size={global_batch}",
                f"the checkpoint is {self.samples_in_epoch} samples into an epoch, which is no "
                "multiple of that batch size",
                "Resume with the global batch size that it was trained with, one that divides "
                f"{self.samples_in_epoch}, or from a checkpoint at the end of an epoch.",
            )
        self.step_in_epoch = steps

    def state_dict(self) -> dict[str, object]:
        """Return the counters as plain values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters that `state_dict` returned."""
        vars(self).update(asdict(TrainState(**state)))


@dataclass(frozen=True)
class Stop:
    """Why training ended.

    Attributes:
        kind: max_steps, epochs, max_time, callback, pruned (the run is complete), stop_after or
            signal (it is to be resumed).
        reason: one sentence, for the summary.
    """

    kind: str
    reason: str

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end, and is not only interrupted."""
        return self.kind not in ("stop_after", "signal")

    @property
    def tested(self) -> bool:
        """Whether the best state is tested at the end."""
        return self.complete and self.kind != PRUNED


class Stopwatch:
    """Measures how long each phase of a run takes (`PHASES`); in some it pauses training."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._lapped = self.spent

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere as those of a phase."""
        self._spent[phase] = self._spent.get(phase, 0.0) + seconds

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Count the time in the context as that of a phase, but what other phases get there."""
        began, counted = time.perf_counter(), sum(self._spent.values())
        try:
            yield
        finally:
            others = sum(self._spent.values()) - counted
            self.add(phase, time.perf_counter() - began - others)

    def lap(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        before, self._lapped = self._lapped, self.spent
        return {phase: seconds - before.get(phase, 0.0) for phase, seconds in self._lapped.items()}

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, pauses included."""
        return time.perf_counter() - self._start

    @property
    def unknown(self) -> float:
        """Seconds since the beginning that are of no phase."""
        return max(0.0, self.elapsed - sum(self._spent.values()))

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of each phase since the beginning; `other` is in none of them."""
        return {**self._spent, "other": self.unknown}

    @property
    def training(self) -> float:
        """Seconds since the beginning, pauses excluded."""
        return self.elapsed - sum(self._spent[phase] for phase in PAUSES)
