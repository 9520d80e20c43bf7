"""Where the order of a loader's samples comes from: passes, generators and epochs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel.comm import rng
from accel.data.samplers import (
    CompletedBatchSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    drawing_sampler,
    samplers,
)
from accel.machine.errors import Problem
from accel.state import PartialState


@dataclass
class Start:
    """The states that decide the order of a pass, as they were when it began.

    Attributes:
        generators: states of the generators that the loader and its samplers hold.
        process: states of the process's own generators that the sampler may draw from, or None.
        samplers: state dicts of the samplers that have one, outermost first.
        epoch: number of the pass, None where the loader does not know it.
        agreed: states of the process's generators when indices for all ranks were drawn, or None.
        digest: of what a sampler that is not known draws first; "" before it does.
        stream: whether the last of `generators` is the loader's own stream of permutations.
    """

    generators: list[torch.Tensor]
    process: dict[str, object] | None = None
    samplers: list[dict[str, object]] = field(default_factory=list)
    epoch: int | None = None
    agreed: dict[str, object] | None = None
    digest: str = ""
    stream: bool = False


@dataclass(eq=False)
class Pass:
    """A pass under way; other fields are values of the pass around it, restored when it ends.

    Attributes:
        epoch: its number.
        given: how many batches it gave.
        in_hand: real samples, and all, of the batch in hand over all processes, where the main
            process read it; None elsewhere.
        num_begun: how many passes had begun over any loader when the batch was given, likewise.
        is_complete: whether it gave all its batches.
        others: the loaders that were read when it began, with the batches that they had given.
    """

    epoch: int
    end_of_dataloader: bool
    remainder: int
    reading: object
    started: Start | None
    at_end: int | None
    given: int = 0
    in_hand: tuple[int, int] | None = None
    num_begun: int = 0
    is_complete: bool = False
    others: list[tuple[Any, int]] = field(default_factory=list)

    def note(self, real: int, size: int, num_begun: int) -> None:
        """Note that a batch is given, `real` of whose `size` samples are no repetitions."""
        self.given += 1
        self.in_hand, self.num_begun = (real, size), num_begun


def begun_after(current: Pass, passes: Sequence[Pass]) -> Pass | None:
    """Return the first of `passes` that began after `current`; it restores what `current` shows."""
    following = passes[passes.index(current) + 1 :]
    return following[0] if following else None


_RANDOM = {kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)}
_KNOWN = _RANDOM | {
    kind.__iter__ for kind in (SequentialSampler, BatchSampler, SeedableRandomSampler)
}
T = TypeVar("T")
# Entries that are drawn at a time: all up to a number, but for a sampler without a length.
_MOST, _WITHOUT_LENGTH = 1 << 22, 1 << 12
# Generators that users gave, with the index of the loader that draws from them first.
_GIVEN: weakref.WeakKeyDictionary[torch.Generator, int] = weakref.WeakKeyDictionary()
_GIVEN_STRONGLY: dict[torch.Generator, int] = {}  # torch 2.9's cannot be referred to weakly
# Loaders prepared on a communicator without an index of their own.
_COUNTED: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


class Order:
    """The order of a loader's samples; shared by a loader and its skipping copies.

    Args:
        stream: generator of the loader's own permutations; None: samplers draw as they are.
        sampler: the sampler without a generator that draws from `stream`, or None.
        draws: the process's own generators that the sampler may draw from: "torch", "all" of them
            (Python's, NumPy's and torch's), or "none". "agreed": rank 0 draws for all.

    Attributes:
        passes: passes that were completed; the epoch, where no sampler has one.
        started: the start of the pass under way or left early; None after a completed pass.
        at_end: the epoch of the pass whose last batch is in hand, or None.
        live: the passes that are under way (more than one where they are nested).
        resumed: the start of a pass that a checkpoint was saved in; the next pass draws its order.
        replay: the start that the pass now beginning draws again, until it has drawn.
        again: the start that a sampler is drawing again at this moment, or None.
        ended: whether the loaded checkpoint was saved with the last batch of a pass in hand.
        states: positions behind the batch in hand and the one fetched ahead (of stateful loaders).
        position: a loaded position from which the next pass continues, or None.
        loaded_into: what the loader skips that it was loaded into: entries of the sampler, and
            batches that it fetches.
    """

    def __init__(
        self, stream: torch.Generator | None = None, sampler: Any = None, draws: str = "none"
    ) -> None:
        self.stream = stream
        self.sampler = sampler
        self.draws = draws
        self.passes = 0
        self.started: Start | None = None
        self.at_end: int | None = None
        self.live: list[Pass] = []
        self.resumed: Start | None = None
        self.replay: Start | None = None
        self.again: Start | None = None
        self.ended = False
        self.states: tuple[dict[str, object], dict[str, object]] | None = None
        self.position: dict[str, Any] | None = None
        self.loaded_into: tuple[int, int] = (0, 0)
        self._after_opening: Start | None = None

    @property
    def under_way(self) -> int:
        """How many passes are under way."""
        return len(self.live)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "live": []}  # passes are not pickled

    # -- states ----------------------------------------------------------------------------

    def capture(self, generators: Sequence[torch.Generator]) -> Start:
        """Return the states of `generators` and of what else the sampler may draw from."""
        found = self.present(generators)
        if self.draws == "all":
            found.process = rng.capture_host()
        elif self.draws == "torch" or (self.replay is not None and self.replay.process):
            found.process = {"torch": torch.get_rng_state()}
        return found

    def present(self, generators: Sequence[torch.Generator]) -> Start:
        """Return the states of only `generators`."""
        states = [generator.get_state() for generator in generators]
        return Start(states, stream=self.stream is not None)

    def restore(self, start: Start, generators: Sequence[torch.Generator]) -> None:
        """Set `generators`, and the process's own, to the states of `start`."""
        # Others may come or go (with the number of processes) and change no order; the stream is
        # the last one.
        own, saved = list(generators), list(start.generators)
        if self.stream is not None and own and start.stream and saved:
            own.pop().set_state(saved.pop())
        for generator, state in zip(own, saved, strict=False):
            generator.set_state(state)
        if start.process is not None:
            rng.restore_host(start.process)
        elif start.agreed is not None and self.draws == "all":  # saved on several processes
            rng.restore_host(start.agreed)

    def cancel(self) -> None:
        """Forget the pass that was under way: the next one draws an order of its own."""
        self.started = self.resumed = self.replay = None
        self.states = self.position = None
        self.ended = False

    def take_stream(self) -> None:
        """Draw from a stream from now on, as loaders do on several processes."""
        self.stream = torch.Generator()
        self.draws = "none"

    def resume(self) -> None:
        """Let the next pass be the one that was left early, whatever loader makes it."""
        if self.resumed is None:
            self.resumed = self.started

    # -- drawing ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def opening(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Context in which torch makes the iterator of a pass.

        Where the pass draws an earlier order again, all generators are left as they were: the
        earlier pass has drawn from them.
        """
        start = self.replay
        self._after_opening = None
        if start is None:
            yield
            return
        now = self.present(generators)
        with rng.preserved():
            self.restore(start, generators)
            try:
                yield
                if self.replay is not None:  # no worker has requested indices yet
                    self._after_opening = self.capture(generators)
            finally:
                self.restore(now, generators)

    @contextlib.contextmanager
    def seeding(self, loader: DataLoader[object], num_generators: int) -> Iterator[None]:
        """Let torch draw the workers' seed where the pass that is drawn again drew it from.

        A dispatched loader of several processes has a generator for it, that of one process has
        none: a draw more, or less, from the process's own generator would make another order.
        `num_generators` is how many the loader and its samplers hold.
        """
        own, start = loader.generator, self.replay
        if start is not None and start.process is not None:
            here = num_generators - int(self.stream is not None)
            saved = len(start.generators) - int(start.stream)
            if saved != here:
                loader.generator = torch.Generator() if saved > here else None
        try:
            yield
        finally:
            loader.generator = own

    def followed(self, sampler: object, entries: Iterator[T]) -> Iterator[T]:
        """Yield the `entries` of a sampler, of which none is drawn yet, many drawn at a time.

        Later draws go on from where the first ones left the generators, whoever draws in between,
        so that a pass that is resumed draws them again.
        """
        held, limit = held_generators(None, sampler, self), num_drawn_at_once(sampler)
        found = list(itertools.islice(entries, limit))
        if self.draws in ("all", "agreed"):
            self._compare(sampler, _digest(found))
        left, host = self.present(held), rng.capture_host()
        while found:
            yield from found
            now = self.present(held)
            with rng.preserved(device=False):
                rng.restore_host(host)
                self.restore(left, held)
                found = list(itertools.islice(entries, limit))
                left, host = self.present(held), rng.capture_host()
                self.restore(now, held)

    def _compare(self, sampler: object, digest: str) -> None:
        """Warn of a sampler that draws other entries again than it had drawn."""
        before = "" if self.again is None else self.again.digest
        other = before.partition(" ")[0] == digest.partition(" ")[0] and before != digest
        if other and PartialState().is_main_process:
            warnings.warn(str(_other_entries(sampler)), stacklevel=2)
        if self.started is not None:
            self.started.digest = digest

    @contextlib.contextmanager
    def drawing(self, generators: Sequence[torch.Generator]) -> Iterator[Start | None]:
        """Context in which a sampler draws its first index; gives the start it draws again."""
        start, after = self.replay, self._after_opening
        self.replay = self._after_opening = None
        with contextlib.ExitStack() as stack:
            self.again = start
            stack.callback(setattr, self, "again", None)
            if after is not None:
                stack.callback(self.restore, self.present(generators), generators)
                stack.enter_context(rng.preserved())
                self.restore(after, generators)
            elsewhere = start is not None and start.process is not None  # saved by one process
            if self.stream is not None and self.sampler.generator is None and not elsewhere:
                # For the moment only: it stays the caller's sampler.
                self.sampler.generator = self.stream
                stack.callback(setattr, self.sampler, "generator", None)
            yield start


class DrawnSampler:
    """The indices of a pass, or batches of them, drawn from the generators that `order` says."""

    def __init__(self, sampler: Any, order: Order, generator: torch.Generator | None) -> None:
        self.sampler = sampler
        self.order = order
        self.generator = generator
        self._begun: Iterator[object] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[object]:
        order = self.order
        held = held_generators(None, self.sampler, order)
        followed = order.draws == "all" or (bool(held) and order.draws != "agreed")
        if order.replay is None and not followed:
            return iter(self.sampler)
        if self._begun is None:  # torchdata iterates twice where it restores a position
            entries = self._entries(self.sampler) if followed else iter(self.sampler)
            self._begun = self._drawn(entries)
        return self._begun

    def _drawn(self, entries: Iterator[object]) -> Iterator[object]:
        self._begun = None
        generators = held_generators(self.generator, self.sampler, self.order)
        with self.order.drawing(generators):
            first = list(itertools.islice(entries, 1))
        yield from first
        yield from entries

    def _entries(self, sampler: Any) -> Iterator[Any]:
        """Return the entries of `sampler`, whose draws are followed."""
        if isinstance(sampler, (SkipBatchSampler, CompletedBatchSampler)):
            return sampler.entries(self._entries(sampler.batch_sampler))
        return self.order.followed(sampler, iter(sampler))


def _digest(entries: Sequence[object]) -> str:
    """Return the number of entries, and a digest of them that is the same in every process."""
    return f"{len(entries)} {hashlib.sha256(repr(_plain(entries)).encode()).hexdigest()}"


def _plain(entry: object) -> object:
    if isinstance(entry, (torch.Tensor, np.ndarray, np.generic)):
        return entry.tolist()
    if isinstance(entry, (list, tuple)):
        return [_plain(item) for item in entry]
    return entry if isinstance(entry, (int, str, float, bytes, type(None))) else type(entry)


def _other_entries(sampler: object) -> Problem:
    name = type(drawing_sampler(sampler)).__name__
    return Problem(
        f"sampler {name} that does not draw again what it had drawn when the checkpoint was saved",
        "the rest of the pass has another order, so that samples are repeated and others skipped",
        f"Let {name} draw from its attribute `generator` (a torch.Generator) or from Python's, "
        "NumPy's or torch's global generator, or give it state_dict() and load_state_dict().",
    )


def held_generators(
    generator: torch.Generator | None, sampler: object, order: Order
) -> list[torch.Generator]:
    """Return the generators that a loader, its samplers and its order draw from."""
    found = [generator, *(getattr(inner, "generator", None) for inner in samplers(sampler))]
    found.append(order.stream)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def generator_of(dataset: object) -> torch.Generator | None:
    """Return the attribute `generator` of an iterable data set, as sharded as it may be."""
    if not isinstance(dataset, IterableDataset):
        return None
    found = getattr(dataset, "generator", None)
    if found is None:  # that of a shard
        found = getattr(getattr(dataset, "dataset", None), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def length_of(sampler: Any) -> int | None:
    """Return how many entries `sampler` yields, None if it does not know."""
    try:
        return len(sampler)
    except TypeError:  # it has no length, or what it draws from has none
        return None


def num_drawn_at_once(sampler: Any) -> int:
    """Return how many entries of a sampler are drawn at a time; with its end, if it has few."""
    length = length_of(sampler)
    return _WITHOUT_LENGTH if length is None else min(length + 1, _MOST)


# -- kinds of samplers --------------------------------------------------------------------------


def draws_randomly(sampler: object) -> bool:
    """Return whether `sampler` is one of torch's that draw from their `generator`."""
    return getattr(type(sampler), "__iter__", None) in _RANDOM


def is_permuting(sampler: object) -> bool:
    """Return whether `sampler` is torch's (or torchdata's) that permutes a data set."""
    iterate = getattr(type(sampler), "__iter__", None)
    return iterate in {RandomSampler.__iter__} | torchdata_iterations("RandomSampler")


def is_known(sampler: object) -> bool:
    """Return whether the order of `sampler` depends only on its arguments and its generator.

    It does if it, and each sampler inside, is one of torch's or ours, or says so by an attribute
    `same_on_every_rank`.
    """
    known = _KNOWN | torchdata_iterations("RandomSampler", "BatchSampler")
    for inner in samplers(sampler):
        if getattr(inner, "same_on_every_rank", False):
            return True
        if not isinstance(inner, range) and getattr(type(inner), "__iter__", None) not in known:
            return False
    return True


def draws_nothing(sampler: object) -> bool:
    """Return whether `sampler` is a plain list of indices."""
    return isinstance(sampler, (Sequence, torch.Tensor, np.ndarray))


def torchdata_iterations(*names: str) -> set[object]:
    """Return the `__iter__` of torchdata's samplers of these names, none if it is not imported."""
    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return set() if module is None else {getattr(module, name).__iter__ for name in names}


# -- seeds ---------------------------------------------------------------------------------------


def next_index(owner: object) -> int:
    """Return how many loaders without an index of their own were prepared for `owner` before."""
    index = _COUNTED.get(owner, 0)
    _COUNTED[owner] = index + 1
    return index


def _first_holder(generator: torch.Generator, loader_index: int) -> int:
    """Return the index of the first loader that holds `generator`: this one, if none did before."""
    try:
        return _GIVEN.setdefault(generator, loader_index)
    except TypeError:
        return _GIVEN_STRONGLY.setdefault(generator, loader_index)


def order_seed(generator: object, data_seed: int | None, loader_index: int) -> int:
    """Return the seed of a loader's permutations.

    Args:
        generator: the one that the caller gave to the sampler, or None. Two that are seeded alike
            draw alike; one that several loaders hold does not.
        data_seed: the seed of the run's data, or None.
        loader_index: how many loaders were prepared before.
    """
    if data_seed is not None:
        base, first = data_seed, 0
    elif isinstance(generator, torch.Generator):
        base, first = generator.initial_seed(), _first_holder(generator, loader_index)
    else:
        base, first = torch.initial_seed(), 0
    return base if loader_index == first else rng.mix_seeds(base, loader_index)
