"""A schedule that follows the clock."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from accel.comm.ops import broadcast_object_list
from accel.machine.errors import Problems


class TimedLR(LambdaLR):
    """A schedule whose position follows the clock of rank 0 where that is ahead of the steps.

    What remains of the schedule after a resume is spread over the time of the resumed run.

    Args:
        schedule: a function of the step.
        num_steps: optimizer steps of the run.

    Attributes:
        follows_time: whether another length cannot be computed afterwards: time is not replayed.
        passed: share of the time that has passed.

    Raises:
        ConfigError: if the run has no limit of time, or the schedule is no such function.
    """

    follows_time = True

    def __init__(self, schedule: object, num_steps: int) -> None:
        seconds: Any = getattr(num_steps, "max_seconds", None)
        problems = Problems()
        if not isinstance(schedule, LambdaLR):
            value = f"scheduler.by_time=true with {type(schedule).__name__}"
            problems.add(value, "it is no function of the step", "Choose scheduler=cosine, or wsd.")
        if seconds is None:
            value, rule = "scheduler.by_time=true without trainer.max_time", "it follows that time"
            problems.add(value, rule, "Set trainer.max_time=01:00:00, or leave by_time out.")
        problems.raise_if()
        assert isinstance(schedule, LambdaLR)
        self.passed = 0.0
        self._num_steps, self._max_seconds = int(num_steps), seconds
        self._origin = (time.monotonic(), 0.0)
        super().__init__(schedule.optimizer, schedule.lr_lambdas)

    def step(self, epoch: int | None = None) -> None:
        """Move on by one step, and to the present time."""
        began, before = self._origin
        share = before + (1 - before) * (time.monotonic() - began) / self._max_seconds
        (self.passed,) = broadcast_object_list([min(1.0, share)])
        super().step(epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group at the present position."""
        position: Any = max(float(self.last_epoch), self.passed * self._num_steps)
        return [
            base * factor(position)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without what this process's clock or the recipe says."""
        own = ("_origin", "_max_seconds", "_num_steps")
        return {name: value for name, value in super().state_dict().items() if name not in own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; its clock goes on from now.

        Args:
            state_dict: as `state_dict` returned it.
        """
        super().load_state_dict(state_dict)
        self._origin = (time.monotonic(), self.passed)
