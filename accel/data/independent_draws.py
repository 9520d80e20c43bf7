"""Sampler draws that only depend on how a pass began, whatever else uses the same generators."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Drawn:
    """How far a sampler has drawn the entries of a pass.

    Attributes:
        asked: number of requests for an entry, prefetched ones and its end included.
        size: samples of all ranks in an entry.
        left: for each generator, the entry before which the pass went on with a stream of its own;
            None: it draws from the generator itself.
        digest: of the entries.
    """

    asked: int
    size: int
    left: list[int | None]
    digest: str


@dataclass(frozen=True)
class _Source:
    """A generator: how its state is read, set and seeded."""

    get: Callable[[], object]
    set: Callable[[Any], object]
    seed: Callable[[int], object]


def _numpy_state() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, np.asarray(keys).tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def _of_torch(generator: torch.Generator) -> _Source:
    return _Source(
        lambda: generator.get_state().numpy().tobytes(),
        lambda state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        generator.manual_seed,
    )


def _of_the_process() -> list[_Source]:
    return [
        _Source(random.getstate, random.setstate, random.seed),
        _Source(_numpy_state, _set_numpy_state, lambda seed: np.random.seed(seed % 2**32)),
        _of_torch(torch.default_generator),
    ]


class PassDraws:
    """The entries that a sampler draws in one pass.

    A sampler that draws each index when it is wanted may use a generator from which a model or an
    augmentation draws in between. Its next indices would depend on these draws, which a resumed
    pass cannot repeat. So from then on it draws from a stream of its own, seeded from the state in
    which it left the generator. As long as nobody else draws, it uses the generator itself.

    Args:
        held: generators that the sampler holds.
        of_the_process: whether it may draw from Python's, NumPy's and torch's, too.
        size: samples of all ranks in an entry.
    """

    def __init__(self, held: Sequence[torch.Generator], of_the_process: bool, size: int) -> None:
        self._sources = [*(_of_the_process() if of_the_process else ()), *map(_of_torch, held)]
        self._size = size
        self._states: list[object] = []  # as the sampler left them; [] before its first entry
        self._left: list[int | None] = [None] * len(self._sources)
        self._leaves: list[int | None] = list(self._left)  # as the drawn-again pass left them
        self._asked = 0
        self._digest = hashlib.sha256()

    def drawn(self) -> Drawn:
        """Return how far the pass is."""
        left = list(self._left)
        for index, source in enumerate(self._sources):
            if self._states and left[index] is None and source.get() != self._states[index]:
                left[index] = self._asked  # as the next entry will find
        return Drawn(self._asked, self._size, left, self._digest.hexdigest())

    def draw(self, entries: Iterator[T], limit: int = 1) -> list[T]:
        """Return the next entries, at most `limit`."""
        outside = [source.get() for source in self._sources]
        for index, source in enumerate(self._sources):
            if self._states and self._left[index] is None:
                leaves = self._leaves[index] == self._asked
                if leaves or outside[index] != self._states[index]:
                    self._leave(index)
            if self._left[index] is not None:
                source.set(self._states[index])
        try:
            return self._noted(list(itertools.islice(entries, limit)), limit)
        finally:
            self._states = [source.get() for source in self._sources]
            for index, source in enumerate(self._sources):
                if self._left[index] is not None:
                    source.set(outside[index])

    def draw_again(self, entries: Iterator[T], before: Drawn) -> list[T]:
        """Return the entries that an earlier pass had drawn.

        The generators are as that pass began, and the caller restores them.
        """
        again: list[T] = []
        if before.size == self._size:
            self._leaves = [*before.left, *self._leaves][: len(self._sources)]
        for number in range(-(-before.asked * before.size // self._size)):
            for index, source in enumerate(self._sources):
                if self._leaves[index] == number:
                    self._states = [source.get() for source in self._sources]
                    self._leave(index)
                    source.set(self._states[index])
            again += self._noted(list(itertools.islice(entries, 1)), 1)
        self._states = [source.get() for source in self._sources]
        return again

    def _leave(self, index: int) -> None:
        """Seed a stream for a generator from the state in which the sampler left it."""
        text = f"{index} {self._states[index]!r}"
        seed = hashlib.sha256(text.encode()).digest()[:8]
        source, outside = self._sources[index], self._sources[index].get()
        source.seed(int.from_bytes(seed, "little") >> 1)
        self._states[index] = source.get()
        source.set(outside)
        self._left[index] = self._asked

    def _noted(self, entries: list[T], asked: int) -> list[T]:
        self._asked += asked
        for entry in entries:
            self._digest.update(repr(_plain(entry)).encode())
        return entries


def _plain(entry: object) -> object:
    """Return indices in a form whose `repr` is the same in every process."""
    if isinstance(entry, (torch.Tensor, np.ndarray, np.generic)):
        return entry.tolist()
    if isinstance(entry, (list, tuple)):
        return [_plain(item) for item in entry]
    return entry if isinstance(entry, (int, str, float, bytes, type(None))) else type(entry)
