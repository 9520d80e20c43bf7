"""One order of samples for all ranks: streams of permutations, agreement, unsharded samplers."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
)

from accel.comm import rng
from accel.comm.base import Communicator
from accel.data.order import (
    Order,
    draws_nothing,
    draws_randomly,
    is_known,
    is_permuting,
    length_of,
    num_drawn_at_once,
    order_seed,
    torchdata_iterations,
)
from accel.data.samplers import SameBatchSize, SeedableRandomSampler, drawing_sampler, index_sampler
from accel.machine.errors import ConfigError, Problem, StateError
from accel.state import PartialState

_COMPARED = 1 << 22  # indices of all ranks together, up to which shards are looked for


class AgreedSampler(SameBatchSize, BatchSampler):  # type: ignore[misc, override]
    """The entries of a sampler as rank 0 draws them, on every rank.

    For samplers that may draw differently on each rank. They are drawn at the start of a pass and
    broadcast in one collective (without a length: in one for each 4096 entries). The length is rank
    0's, as it was when the loader was prepared, or at the start of the last pass. `num_samples` of
    the data set is None where it is not known.
    """

    def __init__(
        self, batch_sampler: Any, order: Order, comm: Communicator, num_samples: int | None
    ) -> None:
        self.batch_sampler = batch_sampler
        self.order = order
        self.comm = comm
        self.num_samples = num_samples
        self._compared = False
        own = length_of(batch_sampler)
        self._lengths = own, own if self._is_single else comm.broadcast_objects([own])[0]

    @property
    def made_from(self) -> Any:
        """The sampler whose entries these are."""
        return self.batch_sampler

    @property
    def _is_single(self) -> bool:
        return self.comm is None or self.comm.world_size == 1

    def __len__(self) -> int:
        own, agreed = self._lengths
        if agreed is not None and length_of(self.batch_sampler) == own:
            return agreed
        return len(self.batch_sampler)  # another epoch's, which is not agreed on yet

    def __getstate__(self) -> dict[str, Any]:
        # A process group is not pickled; the copy draws for this process only.
        return {**self.__dict__, "comm": None}

    def __iter__(self) -> Iterator[Any]:
        length = length_of(self.batch_sampler)
        limit = num_drawn_at_once(self.batch_sampler)
        entries: Iterator[object] | None = None
        while True:
            failure: Exception | None = None
            drawn: list[object] = []
            try:
                if entries is None:
                    self._choose_start()
                    entries = self.order.followed(self.batch_sampler, iter(self.batch_sampler))
                drawn = list(itertools.islice(entries, limit))
            except Exception as error:  # sent to the other ranks below, so that none waits
                failure = error
            # The sampler may end elsewhere on other ranks: rank 0 says where the pass does.
            agreed, is_last = self._agreed(drawn, length, len(drawn) < limit, failure)
            yield from agreed
            if is_last:
                return

    def own_entries(self) -> Iterator[Any]:
        """Yield the entries that this rank's sampler draws, which deals them to the ranks itself.

        They are drawn at the start of a pass, so that a resumed one draws them again.
        """
        self._choose_start()
        return self.order.followed(self.batch_sampler, iter(self.batch_sampler))

    def _choose_start(self) -> None:
        again = self.order.again
        if again is not None:
            if again.agreed is not None:
                rng.restore_host(again.agreed)
        elif self.order.started is not None:
            self.order.started.agreed = rng.capture_host()

    def _agreed(
        self, drawn: list[object], length: int | None, is_last: bool, failure: Exception | None
    ) -> tuple[list[Any], bool]:
        """Return rank 0's entries, and whether they are the last."""
        if self.comm is None or self._is_single:
            if failure is not None:
                raise failure
            return drawn, is_last
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        compare = not self._compared and self._comparable()
        found = self.comm.broadcast_objects([(drawn, reason, is_last, length, compare)])[0]
        ranks = [found[:2]]
        if found[4]:
            self._compared = True
            ranks = self.comm.all_gather_object((drawn, reason))
        if failure is not None:
            raise failure
        failed = {rank: text for rank, (_, text) in enumerate(ranks) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            raise StateError(f"Rank {rank} failed to draw sample indices for all: {text}")
        if found[4]:
            ConfigError.raise_if(
                shard_problems(self.batch_sampler, [d for d, _ in ranks], self.num_samples or 0)
            )
        self._lengths = length, found[3]
        return list(found[0]), found[2]

    def _comparable(self) -> bool:
        length = length_of(self.batch_sampler)
        if self.num_samples is None or length is None:
            return False
        return length * (self.batch_size or 1) * self.comm.world_size <= _COMPARED


def shard_problems(
    sampler: object, drawn: Sequence[Sequence[object]], num_samples: int
) -> list[Problem]:
    """Return what is wrong where what the ranks have `drawn` are shards of the data set already."""
    ranks = [
        {i for entry in entries for i in (entry if isinstance(entry, (list, tuple)) else [entry])}
        for entries in drawn
    ]
    world_size, total = len(ranks), sum(len(found) for found in ranks)
    if num_samples <= 2 * world_size or any(len(found) >= num_samples for found in ranks):
        return []
    covered = len(set().union(*ranks)) > num_samples - world_size
    if not covered or total >= num_samples + world_size:
        return []
    return [
        Problem(
            f"sampler {type(drawing_sampler(sampler)).__name__} that gives each rank other samples",
            "the indices are sharded by `prepare`, so that those of every rank but the first would "
            "never be read",
            "Give the loader the indices of the full data set: omit the sampler, as in "
            "DataLoader(data, shuffle=True).",
        )
    ]


class UnshardedSampler(Sampler[int]):
    """Indices of a `DistributedSampler` over all ranks; its `set_epoch` decides the order."""

    same_on_every_rank = True

    def __init__(self, sampler: DistributedSampler[object]) -> None:
        self.sampler = sampler

    @property
    def epoch(self) -> int:
        """The epoch whose order the next pass has."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self.sampler.dataset)  # type: ignore[arg-type]
        return min(length, self.sampler.total_size) if self.sampler.drop_last else length

    def __iter__(self) -> Iterator[int]:
        length = len(self.sampler.dataset)  # type: ignore[arg-type]
        if not self.sampler.shuffle:
            return iter(range(len(self)))
        generator = torch.Generator().manual_seed(self.sampler.seed + self.epoch)
        return iter(torch.randperm(length, generator=generator).tolist()[: len(self)])


def unshardable_problems(
    sampler: DistributedSampler[object], counts: Sequence[int]
) -> list[Problem]:
    """Return what is wrong with a `DistributedSampler` where one of `counts` replicas is right."""
    remedy = "Omit the sampler, as in DataLoader(data, shuffle=True): `prepare` shards."
    known = torchdata_iterations("StatefulDistributedSampler") | {DistributedSampler.__iter__}
    if type(sampler).__iter__ not in known:
        return [
            Problem(
                f"sampler {type(sampler).__name__} in a loader that is prepared",
                "its own `__iter__` shards the data, and `prepare` would shard it again",
                remedy,
            )
        ]
    if sampler.num_replicas not in counts:
        return [
            Problem(
                f"sampler {type(sampler).__name__} with num_replicas={sampler.num_replicas} on "
                f"{counts[0]} data-parallel ranks",
                "`prepare` would shard the indices of each rank again",
                remedy,
            )
        ]
    return []


# -- seeds ---------------------------------------------------------------------------------------


def agreed_seed(comm: Communicator, seed: int, loader: DataLoader[object], sampler: Sized) -> int:
    """Return rank 0's seed, in one collective.

    Raise `ConfigError` if ranks draw from different data, so that one order cannot serve them all.
    """
    if comm.world_size == 1:
        return seed
    found = comm.all_gather_object((seed, _drawn_from(loader, sampler)))
    facts = [of_rank for _, of_rank in found]
    name = next((n for n in facts[0] if any(fact[n] != facts[0][n] for fact in facts)), None)
    if name is not None:
        listed = ", ".join(f"rank {rank}: {fact[name]}" for rank, fact in enumerate(facts))
        raise ConfigError.of(
            f"sampler {type(sampler).__name__} that differs between ranks ({name}: {listed})",
            "`prepare` shards one order over all ranks, which is the same on each",
            "Give every rank the full data set and the same sampler; do not shard it before.",
        )
    return int(found[0][0])


def _drawn_from(loader: DataLoader[object], sampler: Sized) -> dict[str, object]:
    """Return facts of the data that a sampler draws from, equal on all ranks."""
    dataset = loader.dataset
    return {
        "sampler": type(sampler).__name__,
        "number of samples": len(sampler),
        "size of the data set": len(dataset) if hasattr(dataset, "__len__") else None,
        "indices": _digest(getattr(sampler, "indices", None)),
        "weights": _digest(getattr(sampler, "weights", None)),
        "indices of the subset": _digest(dataset.indices if isinstance(dataset, Subset) else None),
    }


def _digest(values: Iterable[object] | None) -> str | None:
    if values is None:
        return None
    plain = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:12]


# -- the order of a loader -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ordering:
    """How the order of a loader is drawn.

    Args:
        state: of this process.
        count: data-parallel size.
        dispatched: whether only the main process reads.
        seedable: whether random samplers are replaced by `SeedableRandomSampler`.
        data_seed: the seed of the run's data; None: that of the sampler's generator, or of torch.
        loader_index: how many loaders were prepared before.
    """

    state: PartialState
    count: int
    dispatched: bool
    seedable: bool
    data_seed: int | None
    loader_index: int

    @property
    def several(self) -> bool:
        """Whether more than one process needs the order."""
        return self.count > 1 or self.state.num_processes > 1

    def of(self, loader: DataLoader[object]) -> tuple[Any, Order]:
        """Return the index sampler of `loader`, the same on every process, and its order.

        The caller's own objects are left as they are. Raise `ConfigError` if the sampler shards
        already, or differs between ranks.
        """
        outer = index_sampler(loader)
        if isinstance(loader.dataset, IterableDataset):
            return outer, Order(draws="all")
        drawing = drawing_sampler(outer)
        replaced, stream = self._drawing(loader, drawing)
        if outer is drawing:
            outer = replaced
        elif replaced is not drawing:
            given, outer = outer, copy.copy(outer)
            outer.sampler = replaced
            if isinstance(drawing, DistributedSampler):
                outer.made_from = given
        random = draws_randomly(replaced) and replaced.generator is None
        order = Order(stream, replaced if random else None)
        if is_known(outer):
            order.draws = "torch" if random and stream is None else "none"
        elif self.several and not self.dispatched:
            size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
            order.draws = "agreed"
            outer = AgreedSampler(outer, order, self.state.comm, size)
        elif not draws_nothing(drawing):
            order.draws = "all"
        return outer, order

    def _drawing(
        self, loader: DataLoader[object], drawing: Any
    ) -> tuple[Any, torch.Generator | None]:
        """Return the sampler to draw with, and the stream that it draws from (None: as it is)."""
        comm = self.state.comm
        if isinstance(drawing, DistributedSampler):
            if not self.several:
                return drawing, None
            counts = sorted({self.count, self.state.num_processes, 1}, reverse=True)
            ConfigError.raise_if(unshardable_problems(drawing, counts))
            return UnshardedSampler(drawing), None
        if isinstance(drawing, SeedableRandomSampler):
            drawing.seed = agreed_seed(comm, drawing.seed, loader, drawing)
            return drawing, None
        if not draws_randomly(drawing) and not is_permuting(drawing):
            if isinstance(drawing, (SequentialSampler, range)):
                agreed_seed(comm, 0, loader, drawing)  # which draws nothing, but reads alike
            return drawing, None
        if self.seedable and is_permuting(drawing):
            seed = self._seed(loader, drawing)
            return SeedableRandomSampler(
                drawing.data_source, drawing.replacement, drawing._num_samples, data_seed=seed
            ), None
        if self.several:
            is_free = drawing.generator is None and self.data_seed is None
            reads = self.state.num_processes > 1 and not self.dispatched
            seed = self._seed(loader, drawing, is_drawn=is_free and reads)
            if drawing.generator is None:
                return drawing, torch.Generator().manual_seed(seed)
        return drawing, None

    def _seed(self, loader: DataLoader[object], drawing: Any, is_drawn: bool = False) -> int:
        """Return rank 0's seed; `is_drawn`: from torch's generator, as the sampler does alone."""
        if is_drawn:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        else:
            seed = order_seed(drawing.generator, self.data_seed, self.loader_index)
        return agreed_seed(self.state.comm, seed, loader, drawing)
