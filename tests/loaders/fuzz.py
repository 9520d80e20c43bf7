"""Random loaders, read straight and resumed in mid-epoch, on one process and on two.

A configuration is drawn from a seed; each rank reads three epochs, saves in the second, and a fresh
engine with other seeds goes on from there. What every rank read is judged here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from accel import Accelerator, DataLoaderConfiguration
from accel.state import AcceleratorState, GradientState
from tests.helpers import run_distributed

EPOCHS, SAVED_IN = 3, 1
ORDERS = ("sequential", "random", "generator", "weighted", "eager", "lazy", "distributed")


@dataclass(frozen=True)
class Case:
    """One configuration; `repr` gives what reproduces it."""

    world_size: int = 1
    streamed: bool = False
    length: int = 20
    batch_size: int = 4
    drop_last: bool = False
    order: str = "random"
    seedable: bool = False
    dispatch: bool | None = None
    split: bool = False
    even: bool = True
    stateful: bool = False
    workers: int = 0
    loaders: int = 1
    stop: int = 0
    seed: int = 0

    @property
    def round_size(self) -> int:
        """The samples that all ranks read together in a full round."""
        return self.batch_size * (1 if self.split else self.world_size)

    @property
    def dispatched(self) -> bool:
        """Whether the main process reads for all."""
        return self.world_size > 1 and (self.streamed if self.dispatch is None else self.dispatch)

    @property
    def rounds(self) -> int:
        """The batches of rank 0 in a pass."""
        if self.drop_last and (self.even or self.streamed or self.world_size == 1):
            return self.length // self.round_size
        if self.drop_last:
            return self.length // self.batch_size // (1 if self.split else self.world_size)
        return -(-self.length // self.round_size)

    @property
    def stops_after(self) -> int:
        """The batches of the second epoch before the save; 0 for none at all."""
        full = self.length // self.round_size
        return 0 if full == 0 else 1 + self.stop % full

    def samples(self) -> int:
        """Return how many samples all ranks together get in a pass, repetitions included."""
        if self.drop_last:
            return self.rounds * self.round_size
        if not self.even or self.world_size == 1:
            return self.length
        if self.dispatched:
            return -(-self.length // self.world_size) * self.world_size
        return self.rounds * self.round_size


def draw(generator: random.Random) -> Case:
    """Return a random configuration."""
    choose = generator.choice
    world_size = choose([1, 2])
    loaders = choose([1, 1, 1, 2, 3])
    streamed = generator.random() < 0.3
    split = generator.random() < 0.4
    even = generator.random() < 0.6 or (loaders > 1 and world_size > 1)
    dispatch = choose([None, True, False])
    # Ranks that end at different batches have no common position, and the state of a dispatched
    # stream lacks the samples that complete its last round (see StatefulDataLoaderDispatcher).
    has_position = world_size == 1 or (even and not (streamed and dispatch is not False))
    return Case(
        world_size=world_size,
        streamed=streamed,
        length=choose([1, 3, 8, 20, 23, 31, 40]),
        batch_size=generator.randint(1, 3) * (world_size if split else 1),
        drop_last=generator.random() < 0.25,
        order="sequential" if streamed else choose(ORDERS),
        seedable=generator.random() < 0.4,
        dispatch=dispatch,
        split=split,
        even=even,
        stateful=has_position and generator.random() < 0.25,
        workers=choose([0, 0, 0, 1] if streamed else [0, 0, 0, 0, 1, 2]),
        loaders=loaders,
        stop=generator.randrange(40),
        seed=generator.randrange(1000),
    )


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers below `length`, beginning at another one in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        assert self.epoch is not None, "no epoch was told before the pass"
        return ((number + self.epoch) % self.length for number in range(self.length))


class Eager(Sampler[int]):
    """Draws a permutation from torch's own generator when it is iterated over."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Lazy(Eager):
    """Draws each index when it is wanted, from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(random.randrange(len(left)))


def loader_of(case: Case, number: int) -> DataLoader[Any]:
    arguments: dict[str, Any] = {
        "batch_size": case.batch_size,
        "drop_last": case.drop_last,
        "num_workers": case.workers,
        "multiprocessing_context": "fork" if case.workers else None,
    }
    if case.streamed:
        return DataLoader(Stream(case.length), **arguments)
    dataset = Numbers(case.length)
    length = case.length
    if case.order == "random":
        arguments["shuffle"] = True
    elif case.order == "generator":
        seed = case.seed + number
        arguments |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    elif case.order == "weighted":
        arguments["sampler"] = WeightedRandomSampler([1.0] * length, length, replacement=False)
    elif case.order == "eager":
        arguments["sampler"] = Eager(length)
    elif case.order == "lazy":
        arguments["sampler"] = Lazy(length)
    elif case.order == "distributed":
        given = {} if case.world_size > 1 else {"num_replicas": 1, "rank": 0}
        arguments["sampler"] = DistributedSampler(dataset, **given, seed=number)
    return DataLoader(dataset, **arguments)


def engine(case: Case, seed: int) -> tuple[Accelerator, list[Any]]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            split_batches=case.split,
            dispatch_batches=case.dispatch,
            even_batches=case.even,
            use_seedable_sampler=case.seedable,
            use_stateful_dataloader=case.stateful,
        ),
    )
    # Ranks that do not agree.
    torch.manual_seed(seed + accelerator.process_index)
    random.seed(seed + accelerator.process_index)
    loaders = [accelerator.prepare(loader_of(case, number)) for number in range(case.loaders)]
    return accelerator, loaders


def trained(batches: Sequence[torch.Tensor]) -> list[list[int]]:
    torch.rand(3)  # as a model with dropout draws
    return [batch.tolist() for batch in batches]


def read(case: Case, folder: str) -> dict[str, Any]:
    """Return the batches of this rank: those of the straight run, and those after the resume."""
    accelerator, loaders = engine(case, case.seed)
    straight: list[list[Any]] = []
    for epoch in range(EPOCHS):
        passes: list[Any] = []
        for number, batches in enumerate(zip(*loaders, strict=False), start=1):
            passes.append(trained(batches))
            if epoch == SAVED_IN and number == case.stops_after:
                accelerator.save_state(folder)
        straight.append(passes)
    lengths = [len(loader) for loader in loaders]
    found = {"straight": straight, "lengths": lengths, "resumed": None}
    if case.stops_after:
        accelerator, loaders = engine(case, case.seed + 1000)
        accelerator.load_state(folder)
        resumed = []
        if case.stops_after < case.rounds:
            active = loaders
            if not case.stateful:
                active = [
                    accelerator.skip_first_batches(loader, case.stops_after) for loader in loaders
                ]
            resumed.append([trained(batches) for batches in zip(*active, strict=False)])
        for _ in range(SAVED_IN + 1, EPOCHS):
            resumed.append([trained(batches) for batches in zip(*loaders, strict=False)])
        found["resumed"] = resumed
    return found


def read_all(cases: list[Case], folders: list[str]) -> list[dict[str, Any]]:
    """Run cases one after the other on a rank; a failure is given as text."""
    found: list[dict[str, Any]] = []
    for case, folder in zip(cases, folders, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(read(case, folder))
            except Exception:
                found.append({"failed": traceback.format_exc()})
    return found


# -- judging -------------------------------------------------------------------------------------


def problems(case: Case, ranks: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with what the ranks read."""
    failed = [rank["failed"] for rank in ranks if "failed" in rank]
    if failed:
        return [failed[0].strip().splitlines()[-1]]
    found = []
    orders: list[list[list[int]]] = []
    for epoch in range(EPOCHS):
        by_loader = []
        for number in range(case.loaders):
            parts = [[batch[number] for batch in rank["straight"][epoch]] for rank in ranks]
            rounds = itertools.zip_longest(*parts, fillvalue=[])
            order = [sample for group in rounds for batch in group for sample in batch]
            by_loader.append(order)
            found += _counted(case, order, f"epoch {epoch}, loader {number}")
        orders.append(by_loader)
    for rank, given in enumerate(ranks):
        for number, length in enumerate(given["lengths"]):
            if length != len(given["straight"][0]):
                found.append(f"len of loader {number} on rank {rank} is {length}")
        found += _resumed(case, given, rank)
    if case.length >= 20 and case.order != "sequential":
        if len({tuple(order) for by_loader in orders for order in by_loader}) < len(orders):
            found.append("epochs have one order")
        if any(len({tuple(o) for o in by_loader}) < case.loaders for by_loader in orders):
            found.append("loaders have one order")
    return found


def _counted(case: Case, order: list[int], where: str) -> list[str]:
    counts = Counter(order)
    found = []
    if len(order) != case.samples():
        found.append(f"{where}: {len(order)} samples, {case.samples()} expected")
    if case.drop_last:
        if max(counts.values(), default=1) > 1:
            found.append(f"{where}: samples repeated")
    elif len(counts) != case.length:
        found.append(f"{where}: {case.length - len(counts)} samples never read")
    return found


def _resumed(case: Case, given: dict[str, Any], rank: int) -> list[str]:
    if given["resumed"] is None:
        return []
    wanted = [given["straight"][epoch] for epoch in range(SAVED_IN + 1, EPOCHS)]
    if case.stops_after < case.rounds:
        wanted.insert(0, given["straight"][SAVED_IN][case.stops_after :])
    names = ["the rest of the epoch", "the next epoch"][-len(wanted) :]
    if case.order == "lazy" and (case.world_size == 1 or case.dispatched):
        # What others draw in between from the same generator is not known: the next one differs.
        names = names[:1] if len(names) == 2 and case.loaders == 1 else []
    return [
        f"rank {rank}: {name} differs after the resume"
        for name, one, other in zip(names, wanted, given["resumed"], strict=False)
        if one != other
    ]


def run(cases: Sequence[Case], at_once: int = 20) -> list[list[str]]:
    """Return what is wrong with each case, in their order."""
    found: list[list[str]] = [[] for _ in cases]
    with tempfile.TemporaryDirectory() as root:
        for world_size in sorted({case.world_size for case in cases}):
            places = [i for i, case in enumerate(cases) if case.world_size == world_size]
            for start in range(0, len(places), at_once):
                chunk = places[start : start + at_once]
                folders = [str(Path(root) / str(place)) for place in chunk]
                chosen = [cases[place] for place in chunk]
                try:
                    ranks = run_distributed(read_all, world_size, chosen, folders)
                except AssertionError as error:
                    for place in chunk:
                        found[place] = [f"the ranks did not end: {str(error)[-200:]}"]
                    continue
                for number, place in enumerate(chunk):
                    with contextlib.suppress(IndexError):
                        found[place] = problems(cases[place], [rank[number] for rank in ranks])
    return found


def drawn(seed: int, count: int) -> list[Case]:
    """Return `count` configurations of a seed."""
    generator = random.Random(seed)
    return [draw(generator) for _ in range(count)]


def reproducer(case: Case) -> str:
    """Return the call that makes `case`, without what is as by default."""
    default = Case()
    told = {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if getattr(case, field.name) != getattr(default, field.name)
    }
    return f"Case({', '.join(f'{name}={value!r}' for name, value in told.items())})"
