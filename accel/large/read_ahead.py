"""Weights of the next module, read in a thread while this one computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from accel.device import copies_in_order
from accel.large.tensors import Device, as_device

# Below this, reading takes less than starting a thread does.
MIN_BYTES = 1 << 20
_PAGE = 4096


@dataclass(frozen=True)
class Block:
    """The offloaded weights of one module.

    Args:
        names: of the weights, in the module.
        weights: by name; reading one may take long.
        device: where they are wanted.
        num_bytes: of all of them.
    """

    names: tuple[str, ...]
    weights: Mapping[str, torch.Tensor]
    device: Device
    num_bytes: int


@dataclass
class _Reading:
    """One block on its way into memory."""

    block: Block
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self._read, name="accel-read-ahead")
        self.thread.start()

    def _read(self) -> None:
        try:
            pins = copies_in_order(as_device(self.block.device))
            for name in self.block.names:
                tensor = self.block.weights[name]
                self.tensors[name] = tensor.pin_memory() if pins else _touched(tensor)
        except Exception as error:  # raised where the weights are wanted
            self.error = error

    def wait(self) -> dict[str, torch.Tensor]:
        assert self.thread is not None
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.tensors


def _touched(tensor: torch.Tensor) -> torch.Tensor:
    """Read every page of a mapped tensor; torch does that without the interpreter's lock."""
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].max()
    return tensor


class ReadAhead:
    """Reads the block after the one that runs, by the order in which blocks ran before.

    Before a block has run once, the one registered after it counts as next. At most one block is
    read ahead.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._next: dict[int, int] = {}
        self._last: int | None = None
        self._reading: tuple[int, _Reading] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_reading": None}  # a thread is neither copied nor pickled

    def register(self, block: Block) -> int:
        """Add the block that comes after those registered so far; return its number."""
        self._blocks.append(block)
        return len(self._blocks) - 1

    def take(self, number: int) -> dict[str, torch.Tensor]:
        """Return what was read ahead of a block, if it was; start reading the next."""
        reading, self._reading = self._reading, None
        ready: dict[str, torch.Tensor] = {}
        if reading is not None:
            found = reading[1].wait()
            ready = found if reading[0] == number else {}
        self._learn(number)
        self._start(self._next.get(number, number + 1))
        return ready

    def _learn(self, number: int) -> None:
        if self._last is not None and number > 0:  # block 0 begins another pass
            self._next[self._last] = number
        self._last = number

    def _start(self, number: int) -> None:
        if number < len(self._blocks) and self._blocks[number].num_bytes >= MIN_BYTES:
            reading = _Reading(self._blocks[number])
            reading.start()
            self._reading = number, reading
