"""Micro-batches, and the window of them that makes one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class MicroBatch:
    """What one process computes in one forward pass.

    Attributes:
        batch: as collated, on the device.
        valid: [B] bool, False where a sample only pads the batch; None: all are real.
    """

    batch: Any
    valid: torch.Tensor | None = None


@dataclass
class Window:
    """The micro-batches of one optimizer step on this process.

    Attributes:
        micro_batches: in order; every process has as many.
        num_samples: real samples of the step over all processes.
    """

    micro_batches: list[MicroBatch]
    num_samples: int


def with_last(
    windows: Iterator[Window], num_before: int, num_windows: int | None
) -> Iterator[tuple[Window, bool]]:
    """Yield each window and whether it is the last of its epoch.

    Args:
        windows: of one epoch, from `num_before` on.
        num_before: how many of the epoch were skipped.
        num_windows: how many the whole epoch has; None: unknown, so each is fetched one ahead.
    """
    if num_windows is not None:
        for number, window in enumerate(windows, start=num_before + 1):
            yield window, number == num_windows
        return
    ahead = next(windows, None)
    while ahead is not None:
        window, ahead = ahead, next(windows, None)
        yield window, ahead is None
