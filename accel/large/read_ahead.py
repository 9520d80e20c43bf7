"""Weights of the next module, read in a thread while this one computes.

Nobody waits for the thread to be scheduled: a block that it has not begun is read by who wants it,
and of a mapped block that it has begun the pages are read by both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from accel.device import copies_in_order
from accel.large.tensors import Device, as_device

# Below this, reading takes less than handing over to a thread does.
MIN_BYTES = 1 << 20
_WINDOW = 1 << 16  # bytes that Linux maps at one page fault (fault_around_bytes)
_STRETCH = 1 << 23  # bytes read between two looks at whether they are still wanted


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


class _Reading:
    """One block on its way into memory."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._tensors: dict[str, torch.Tensor] = {}
        self._error: Exception | None = None
        self._begun = threading.Lock()  # held by who reads the block
        self._mapped = threading.Event()
        self._unwanted = False

    def run(self) -> None:
        """Map or pin the weights, then read what is mapped; in the thread."""
        if not self._begun.acquire(blocking=False):
            return
        mapped = list[torch.Tensor]()
        try:
            pins = copies_in_order(as_device(self.block.device))
            for name in self.block.names:
                tensor = self.block.weights[name]
                self._tensors[name] = tensor.pin_memory() if pins else tensor
                mapped += [] if pins else [tensor]
        except Exception as error:  # raised where the weights are wanted
            self._error = error
        self._mapped.set()
        self._read(mapped)

    def _read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read the pages of tensors; torch does that without the interpreter's lock."""
        for tensor in tensors:
            content = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, len(content), _STRETCH):
                if self._unwanted:
                    return
                content[start : start + _STRETCH : _WINDOW].max()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the weights, none if the thread has not begun; raise the error of reading them."""
        if self._begun.acquire(blocking=False):
            return {}
        self._mapped.wait()
        if self._error is not None:
            raise self._error
        tensors, self._tensors = self._tensors, {}
        return tensors

    def stop(self) -> None:
        """Have the thread read no more of the block."""
        self._begun.acquire(blocking=False)
        self._unwanted = True


class ReadAhead:
    """Reads the block after the one that runs, by the order in which blocks ran before.

    Before a block has run once, the one registered after it counts as next. At most one block is
    read ahead; there is a thread from the first block of a forward pass to the last.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._next: dict[int, int] = {}
        self._last: int | None = None
        self._ahead: tuple[int, _Reading] | None = None
        self._current: _Reading | None = None
        self._executor: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, object]:
        # A thread is neither copied nor pickled.
        return {**self.__dict__, "_ahead": None, "_current": None, "_executor": None}

    def register(self, block: Block) -> int:
        """Add the block that comes after those registered so far; return its number."""
        self._blocks.append(block)
        return len(self._blocks) - 1

    def take(self, number: int) -> dict[str, torch.Tensor]:
        """Return what was read ahead of a block, if it was; start reading the next."""
        ahead, self._ahead = self._ahead, None
        self._stop()
        ready: dict[str, torch.Tensor] = {}
        if ahead is not None and ahead[0] == number:
            self._current = ahead[1]
            ready = self._taken(ahead[1])
        elif ahead is not None:
            ahead[1].stop()
        self._learn(number)
        self._start(self._next.get(number, number + 1))
        return ready

    def _taken(self, reading: _Reading) -> dict[str, torch.Tensor]:
        try:
            return reading.take()
        except Exception:
            self.release()
            raise

    def release(self) -> None:
        """Read no more of the block that was taken last; end the thread if no other is read."""
        self._stop()
        if self._ahead is None and self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _stop(self) -> None:
        if self._current is not None:
            self._current.stop()
        self._current = None

    def _learn(self, number: int) -> None:
        if self._last is not None and number > 0:  # block 0 begins another pass
            self._next[self._last] = number
        self._last = number

    def _start(self, number: int) -> None:
        if number < len(self._blocks) and self._blocks[number].num_bytes >= MIN_BYTES:
            reading = _Reading(self._blocks[number])
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "accel-read-ahead")
            self._executor.submit(reading.run)
            self._ahead = number, reading
