"""Schedulers as parts of a checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

# Measurements in the state of a ReduceLROnPlateau; the rest are its options.
MEASURED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


class ScheduleState:
    """A scheduler as a part of a checkpoint: it ignores the state of another class of scheduler.

    `replaced`: the restored state was of another class, and was ignored. The restored schedule had
    followed `num_steps` optimizer steps; None: it followed measurements, or nothing was restored.
    """

    NOTE = "runner"

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        options = state_of(scheduler) if isinstance(scheduler, ReduceLROnPlateau) else {}
        self._fresh = {name: value for name, value in options.items() if name not in MEASURED}
        self.replaced = False
        self.num_steps: int | None = None
        self._restored_mode: str | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the scheduler's state, its class, and how many steps it has followed."""
        scheduler = self._scheduler
        steps = getattr(scheduler, "last_epoch", None) if is_replayed(scheduler) else None
        note = {"class": self._class, "num_steps": steps if isinstance(steps, int) else None}
        return {**scheduler.state_dict(), self.NOTE: note}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler, if the state is that of its class."""
        state = dict(state)
        note = state.pop(self.NOTE)
        self.replaced = note["class"] != self._class
        if not self.replaced:
            self._scheduler.load_state_dict(state)
            self._restored_mode = state.get("mode")
        self.num_steps = note["num_steps"]

    def reconfigure(self) -> None:
        """Restore the recipe's options of a scheduler that monitors a metric."""
        if self._fresh and not self.replaced:
            self._scheduler.load_state_dict(self._fresh)

    def reset_best(self, remeasured: bool) -> bool:
        """Reset a scheduler's best if its metric is `remeasured`; return whether it was reset."""
        scheduler = self._scheduler
        if not isinstance(scheduler, ReduceLROnPlateau) or self.replaced:
            return False
        if self._restored_mode is None:
            return False
        if not remeasured and scheduler.mode == self._restored_mode:
            return False
        scheduler.best = math.inf if scheduler.mode == "min" else -math.inf
        scheduler.num_bad_epochs = 0
        return True

    @property
    def _class(self) -> str:
        kind = type(self._scheduler)
        return f"{kind.__module__}.{kind.__qualname__}"


def is_replayed(scheduler: object) -> bool:
    """Return whether the rates of a scheduler depend only on the number of steps."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a copy of the state dict of a scheduler."""
    return copy.deepcopy(dict(scheduler.state_dict()))
