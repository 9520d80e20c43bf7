"""Trials of a short run: learning rates that grow, and the memory that a batch takes."""

from __future__ import annotations

import math
import resource
import sys
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
    is `lr_find` of the summary: rates, losses, smoothed losses and the suggested rate.

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
        factor = (max_lr / min_lr) ** (1 / (num_steps - 1))
        self.rates = [min_lr * factor**step for step in range(num_steps)]
        self.losses: list[float] = []

    def on_start(self, loop: Run) -> None:
        """Begin with the lowest rate."""
        groups = [group for one in loop.step.optimizers.values() for group in one.param_groups]
        largest = max(float(group["lr"]) for group in groups)
        self._groups = [(group, float(group["lr"]) / largest) for group in groups]
        self._set(self.rates[0])

    def on_step(self, loop: Run) -> None:
        """Set the rate of the next step."""
        self._set(self.rates[min(loop.state.step, len(self.rates) - 1)])

    def _set(self, rate: float) -> None:
        for group, ratio in self._groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def on_log(self, loop: Run, values: Mapping[str, float]) -> None:
        """Keep the loss of the step; stop where it diverges."""
        self.losses.append(values["loss"])
        found = smoothed(self.losses)
        lowest = min(found)
        if not found[-1] <= lowest + DIVERGED * abs(lowest):
            loop.stop("the loss diverges")

    def on_end(self, loop: Run) -> None:
        """Tell what was found."""
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        rates = self.rates[: len(losses)]
        loop.results["lr_find"] = {
            **{"rates": rates, "losses": losses, "smoothed": smoothed(losses)},
            "suggestion": steepest(rates, smoothed(losses)),
        }


def smoothed(losses: Sequence[float], reach: int = 4) -> list[float]:
    """Return the mean of each loss and of up to `reach` others before and after it."""
    return [
        float(np.mean(losses[max(0, step - reach) : step + reach + 1]))
        for step in range(len(losses))
    ]


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
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        else:
            peak = torch.accelerator.max_memory_allocated(device)
        found = torch.tensor(float(peak), device=device)
        most = int(loop.accelerator.comm.all_reduce(found, "max"))
        loop.results["memory"] = [most, device.type]
