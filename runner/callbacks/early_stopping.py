"""End training when the validation data shows no more progress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel.machine.errors import Problems, nearest
from runner.training.evaluation import monitored_value
from runner.training.run import Callback
from runner.training.state import is_better

if TYPE_CHECKING:
    from runner.training.run import Run

EQUAL = -math.ulp(0.0)  # a `min_delta` with which an equal value is better, too


class EarlyStopping(Callback):
    """Ends training after some evaluations in a row without improvement.

    Args:
        patience: number of evaluations without improvement.
        min_delta: least change of the metric that counts as an improvement.
        monitor: the validation metric; None: the one by which the run chooses its best state.
        mode: whether its best is the "max" or the "min"; None: as the run has it.
        start: steps before which no evaluation counts.
        threshold: value of the metric that is good enough: training ends once it is reached.
        divergence: value of the metric from which training has diverged: it ends beyond it, or
            where the metric is not a number.
    """

    def __init__(
        self,
        patience: int = 3,
        min_delta: float = 0.0,
        monitor: str | None = None,
        mode: str | None = None,
        start: int = 0,
        threshold: float | None = None,
        divergence: float | None = None,
    ) -> None:
        problems = Problems()
        if patience < 1:
            problems.add(f"early_stopping.patience={patience}", "it is at least 1", "Give 3.")
        if min_delta < 0:
            rule, remedy = "it is at least 0", "Leave it out to count any improvement."
            problems.add(f"early_stopping.min_delta={min_delta}", rule, remedy)
        if mode not in (None, "min", "max"):
            rule, remedy = "it is one of min, max", nearest(mode, ("min", "max"))
            problems.add(f"early_stopping.mode={mode!r}", rule, remedy)
        problems.raise_if()
        self.patience = patience
        self.min_delta = min_delta
        self.monitor = monitor
        self.mode = mode
        self.start, self.threshold, self.divergence = start, threshold, divergence
        self.best: float | None = None
        self.num_waited = 0
        self._step: int | None = None  # of the last evaluation
        self._restored: Mapping[str, Any] | None = None

    def on_sanity_check(self, loop: Run, metrics: Mapping[str, float]) -> None:
        """Refuse a metric that is not measured."""
        monitored_value(metrics, self.monitor or loop.monitor, "callbacks.early_stopping.monitor")

    def on_start(self, loop: Run) -> None:
        """Take monitor and mode of the run by default; continue from a restored state."""
        self.monitor = self.monitor or loop.monitor
        self.mode = self.mode or loop.mode
        found = self._restored
        if found and not loop.remeasured and found["measured"] == [self.monitor, self.mode]:
            self.best, self.num_waited, self._step = found["best"], found["waited"], found["step"]
        elif found:
            loop.display.note(
                f"Early stopping monitored another metric: the best {self.monitor} "
                f"({self.mode}) is reset."
            )
        loop.require_validation("callbacks.early_stopping")

    def on_evaluate(self, loop: Run, split: str, metrics: Mapping[str, float]) -> None:
        """Count the evaluations since the last improvement."""
        if split != "validation" or loop.state.step == self._step:  # a resume may measure it again
            return
        self._step = loop.state.step
        value = monitored_value(metrics, self.monitor, "callbacks.early_stopping.monitor")
        if loop.state.step < self.start:
            return
        mode = str(self.mode)
        if self.threshold is not None and is_better(value, self.threshold, mode, EQUAL):
            loop.stop(f"{self.monitor}={value:.6g} has reached the threshold {self.threshold}")
        if self.divergence is not None and not is_better(value, self.divergence, mode, EQUAL):
            loop.stop(f"{self.monitor}={value:.6g} has diverged beyond {self.divergence}")
        if is_better(value, self.best, mode, self.min_delta):
            self.best, self.num_waited = value, 0
            return
        self.num_waited += 1
        if self.num_waited >= self.patience:
            loop.stop(
                f"no improvement of {self.monitor} in {self.num_waited} evaluations "
                f"(best {self.best:.6g})"
                if self.best is not None
                else f"{self.monitor} was not a number in {self.num_waited} evaluations"
            )

    def state_dict(self) -> dict[str, object]:
        """Return the best value, its metric, and the evaluations since then."""
        found = {"best": self.best, "waited": self.num_waited, "step": self._step}
        return {**found, "measured": [self.monitor, self.mode]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state of `state_dict` until the run starts."""
        self._restored = state
