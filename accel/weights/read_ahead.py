"""Weights of the next module, read in a thread while this one computes.

Nobody waits for the thread to be scheduled: a block that it has not begun is read by who wants it,
and of a mapped block that it has begun the pages are read by both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from accel.machine.device import copies_in_order
from accel.weights.folder import in_memory
from accel.weights.tensors import Device, as_device

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
        # By name: the tensor of the mapping, and where it is read to.
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
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
                self._tensors[name] = tensor, tensor.pin_memory() if pins else tensor
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
        """Return the weights, none if the thread has not begun; raise the error of reading them.

        Those that the mapping has in memory by now, as another value, are left out.
        """
        if self._begun.acquire(blocking=False):
            return {}
        self._mapped.wait()
        if self._error is not None:
            raise self._error
        tensors, self._tensors = self._tensors, {}
        weights = self.block.weights
        return {
            name: ready
            for name, (source, ready) in tensors.items()
            if not in_memory(weights, name) or weights[name] is source
        }

    def stop(self) -> None:
        """Have the thread read no more of the block."""
        self._begun.acquire(blocking=False)
        self._unwanted = True


class ReadAhead:
    """Reads the block after the one that runs, by the order in which blocks ran before.

    Before a block has run once, the one registered after it counts as next. At most one block is
    read ahead, in a thread that is there while it reads.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._next: dict[int, int] = {}
        self._last: int | None = None
        self._ahead: tuple[int, _Reading] | None = None
        self._current: _Reading | None = None

    def __getstate__(self) -> dict[str, object]:
        # A thread is neither copied nor pickled.
        return {**self.__dict__, "_ahead": None, "_current": None}

    def register(self, block: Block) -> int:
        """Add the block that comes after those registered so far; return its number."""
        self._blocks.append(block)
        return len(self._blocks) - 1

    def read_from(self, number: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Read the weights of a block from another mapping, if it is another."""
        if self._blocks[number].weights is not weights:
            self._blocks[number] = replace(self._blocks[number], weights=weights)
            self.forget(number)

    def forget(self, number: int) -> None:
        """Drop what was read ahead of a block, as its weights have other values now."""
        if self._ahead is not None and self._ahead[0] == number:
            self._ahead[1].stop()
            self._ahead = None

    def take(self, number: int) -> dict[str, torch.Tensor]:
        """Return what was read ahead of a block, if it was; start reading the next."""
        ahead, self._ahead = self._ahead, None
        self.release()
        ready: dict[str, torch.Tensor] = {}
        if ahead is not None and ahead[0] == number:
            self._current = ahead[1]
            ready = ahead[1].take()
        elif ahead is not None:
            ahead[1].stop()
        self._learn(number)
        self._start(self._next.get(number, number + 1))
        return ready

    def release(self) -> None:
        """Read no more of the block that was taken last."""
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
            threading.Thread(target=reading.run, name="accel-read-ahead").start()
            self._ahead = number, reading
