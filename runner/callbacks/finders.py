"""Trials of a short run: learning rates that grow, and the memory that a batch takes."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from accel.machine.errors import ConfigError
from runner.training.run import Callback

if TYPE_CHECKING:
    from runner.training.run import Run

DIVERGED = 3.0  # rise above the smallest loss, in its size


class LRFind(Callback):
    """Trains each step with a higher learning rate until the loss diverges, and suggests one.

    The rates grow by one factor a step. Parameter groups keep the ratio of their rates. The result
    is `lr_find` of the summary: rates, smoothed losses and the suggested rate.

    Source: Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186).

    Args:
        min_lr: rate of the first step.
        max_lr: rate of the last step.
        num_steps: how many steps there are.
    """

    def __init__(self, min_lr: float = 1e-6, max_lr: float = 1.0, num_steps: int = 100) -> None:
        if not 0 < min_lr < max_lr or num_steps < 10:
            value = f"rates from {min_lr} to {max_lr} in {num_steps} steps"
            rule = "they grow from above 0, in at least 10 steps"
            raise ConfigError.of(value, rule, "Give --min 1e-6 --max 1 --steps 100.")
        self.rates: list[float] = np.geomspace(min_lr, max_lr, num_steps).tolist()
        self.losses: list[float] = []

    def on_start(self, loop: Run) -> None:
        """Begin with the lowest rate."""
        groups = [group for one in loop.step.optimizers.values() for group in one.param_groups]
        largest = max(group["lr"] for group in groups)
        self._groups = [(group, group["lr"] / largest) for group in groups]
        self.on_step(loop)

    def on_step(self, loop: Run) -> None:
        """Set the rate of the next step."""
        for group, ratio in self._groups:
            group["lr"] = ratio * self.rates[min(loop.state.step, len(self.rates) - 1)]

    def on_log(self, loop: Run, values: Mapping[str, float]) -> None:
        """Keep the loss of the step; stop where it diverges."""
        self.losses.append(values["loss"])
        lowest = min(found := smoothed(self.losses))
        if not found[-1] <= lowest + DIVERGED * abs(lowest):
            loop.stop("the loss diverges")

    def on_end(self, loop: Run) -> None:
        """Tell what was found."""
        losses = smoothed([loss for loss in self.losses if math.isfinite(loss)])
        rates = self.rates[: len(losses)]
        suggestion = steepest(rates, losses)
        loop.results["lr_find"] = {"rates": rates, "losses": losses, "suggestion": suggestion}


def smoothed(losses: Sequence[float], reach: int = 4) -> list[float]:
    """Return the mean of each loss and of up to `reach` others before and after it."""
    around = (losses[max(0, step - reach) : step + reach + 1] for step in range(len(losses)))
    return [float(np.mean(part)) for part in around]


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which losses fall fastest by its logarithm, before the smallest of them.

    None: they fall nowhere.
    """
    lowest = int(np.argmin(losses)) + 1 if losses else 0
    if lowest < 3:
        return None
    return rates[int(np.gradient(losses[:lowest], np.log(rates[:lowest])).argmin())]


class PeakMemory(Callback):
    """Tells the most memory that a process of the run takes: `memory` of the summary.

    That is the number of bytes and the type of the device: of an accelerator, or of the process
    where it trains on the CPU.
    """

    def on_end(self, loop: Run) -> None:
        """Tell it."""
        device = loop.accelerator.device
        if device.type == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux tells KiB
        else:
            peak = torch.accelerator.max_memory_allocated(device)
        found = loop.accelerator.comm.all_reduce(torch.tensor(float(peak), device=device), "max")
        loop.results["memory"] = [int(found), device.type]
