"""Micro-batches, and the window of them that makes one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from accel.comm.ops import send_to_device
from accel.machine.device import copies_in_order


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one rank in one forward pass.

    Attributes:
        batch: as collated.
        valid: [B] bool, False where a sample only pads the batch; None: all are real.
    """

    batch: Any
    valid: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> MicroBatch:
        """Return this micro-batch on `device`."""
        return MicroBatch(
            send_to_device(self.batch, device, non_blocking),
            send_to_device(self.valid, device, non_blocking),
        )


class OnDevice(Sequence[MicroBatch]):
    """Micro-batches that lie on the host, and move to the device one at a time, when they are read.

    Copies to an accelerator are not waited for.
    """

    def __init__(self, on_host: Sequence[MicroBatch], device: torch.device) -> None:
        self.on_host = on_host
        self._device = device
        self._non_blocking = copies_in_order(device)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> OnDevice: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | OnDevice:
        if isinstance(index, slice):
            return OnDevice(self.on_host[index], self._device)
        return self.on_host[index].to(self._device, self._non_blocking)

    def __len__(self) -> int:
        return len(self.on_host)


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        micro_batches: in order, each on the device once it is read; every rank has as many.
        num_samples: real samples of the step over all processes.
    """

    micro_batches: Sequence[MicroBatch]
    num_samples: int

    @property
    def on_host(self) -> Sequence[MicroBatch]:
        """The micro-batches as they were read, before they move to the device."""
        read = self.micro_batches
        return read.on_host if isinstance(read, OnDevice) else read


def with_last(
    windows: Iterator[Window], num_before: int, num_windows: int | None
) -> Iterator[tuple[Window, bool]]:
    """Yield each window, from `num_before` on, and whether it is the last of its epoch.

    Where `num_windows` of the epoch is None (unknown), each is fetched one ahead.
    """
    if num_windows is not None:
        for number, window in enumerate(windows, start=num_before + 1):
            yield window, number == num_windows
        return
    ahead = next(windows, None)
    while ahead is not None:
        window, ahead = ahead, next(windows, None)
        yield window, ahead is None
