"""Random loaders, read straight and resumed in mid-epoch, on one process and on two.

A configuration is drawn from a seed; each rank reads three epochs, saves in the second, and a fresh
engine with other seeds goes on from there. What every rank read is judged here. Many configurations
are read by one pair of processes, in one process group.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import random
import resource
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from accel import Accelerator, DataLoaderConfiguration
from accel.state import AcceleratorState, GradientState
from tests.helpers import close_pools, run_distributed

EPOCHS, SAVED_IN = 3, 1
ORDERS = (
    *("sequential", "random", "generator", "weighted", "replacement"),
    *("eager", "lazy", "shared", "distributed"),
)


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
    skips: int = 0
    ahead: int = 0
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

    @property
    def apart(self) -> bool:
        """Whether ranks may save at different batches: each knows its position, and reads alone."""
        return self.world_size > 1 and self.stateful and not self.dispatched

    def stops_on(self, rank: int) -> int:
        """Return after how many batches a rank saves."""
        ahead = self.ahead if rank and self.apart and self.stops_after else 0
        return self.stops_after + ahead

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once, or never."""
        return self.order == "replacement"

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
        stateful=generator.random() < 0.3,
        skips=generator.randrange(3) if generator.random() < 0.3 else 0,
        ahead=generator.randrange(4),
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
            yield left.pop(self.draw(len(left)))

    def draw(self, limit: int) -> int:
        return random.randrange(limit)


SHARED = torch.Generator()


class Shared(Lazy):
    """Draws each index when it is wanted, from a generator that the training loop uses, too."""

    generator = SHARED

    def draw(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator))


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
    elif case.order == "replacement":
        generator = torch.Generator().manual_seed(case.seed + number)
        arguments["sampler"] = RandomSampler(
            dataset, replacement=True, num_samples=length, generator=generator
        )
    elif case.order == "shared":
        arguments["sampler"] = Shared(length)
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
    SHARED.manual_seed(seed + accelerator.process_index)
    loaders = [accelerator.prepare(loader_of(case, number)) for number in range(case.loaders)]
    return accelerator, loaders


def trained(batches: Sequence[torch.Tensor]) -> list[list[int]]:
    # As a model with dropout draws, an augmentation, and what shares a sampler's generator.
    torch.rand(3), random.random(), torch.rand(2, generator=SHARED)
    return [batch.tolist() for batch in batches]


def read(case: Case, folder: str) -> dict[str, Any]:
    """Return the batches of this rank: those of the straight run, and those after the resume."""
    accelerator, loaders = engine(case, case.seed)
    stop = case.stops_on(accelerator.process_index)
    straight: list[list[Any]] = []
    for epoch in range(EPOCHS):
        passes: list[Any] = []
        begun = _begun(case, accelerator, loaders) if epoch == SAVED_IN else []
        passes += begun
        rest = skipping(accelerator, loaders, len(begun))
        for number, batches in enumerate(zip(*rest, strict=False), start=len(begun) + 1):
            passes.append(trained(batches))
            if epoch == SAVED_IN and number == stop:
                accelerator.save_state(folder)
        if epoch == SAVED_IN and stop > len(passes):
            accelerator.save_state(folder)
        straight.append(passes)
    lengths = [len(loader) for loader in loaders]
    found = {"straight": straight, "lengths": lengths, "stop": stop, "resumed": None}
    if case.stops_after:
        left = accelerator.gather(torch.tensor([len(straight[SAVED_IN]) - stop]))
        accelerator, loaders = engine(case, case.seed + 1000)
        accelerator.load_state(folder)
        resumed = []
        if (left > 0).any():
            active = loaders if case.stateful else skipping(accelerator, loaders, stop)
            resumed.append([trained(batches) for batches in zip(*active, strict=False)])
        for _ in range(SAVED_IN + 1, EPOCHS):
            resumed.append([trained(batches) for batches in zip(*loaders, strict=False)])
        found["resumed"] = resumed
    return found


def _begun(case: Case, accelerator: Accelerator, loaders: list[Any]) -> list[Any]:
    """Read some batches of a pass and leave it; the rest is read by skipping copies."""
    number = min(case.skips, case.stops_after - 1)
    found = []
    if number > 0:
        for batches in zip(*loaders, strict=False):
            found.append(trained(batches))
            if len(found) == number:
                break
    return found


def skipping(accelerator: Accelerator, loaders: list[Any], number: int) -> list[Any]:
    return [accelerator.skip_first_batches(loader, number) for loader in loaders]


def cpu_seconds() -> float:
    """Return the processor time of this process and its ended loader workers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def read_all(cases: list[Case], folders: list[str]) -> list[dict[str, Any]]:
    """Run cases one after the other on a rank; a failure is given as text."""
    found: list[dict[str, Any]] = []
    for case, folder in zip(cases, folders, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = cpu_seconds()
            try:
                found.append(read(case, folder))
            except Exception:
                found.append({"failed": traceback.format_exc()})
            found[-1]["cpu"] = cpu_seconds() - began
    return found


# -- judging -------------------------------------------------------------------------------------


def problems(case: Case, ranks: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with what the ranks read."""
    failed = [rank["failed"] for rank in ranks if "failed" in rank]
    if failed and case.apart and all("a pass begins on all ranks together" in f for f in failed):
        return []  # saved in different epochs: refused
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
        found += _resumed(case, ranks, rank)
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
        if max(counts.values(), default=1) > 1 and not case.repeats:
            found.append(f"{where}: samples repeated")
    elif len(counts) != case.length and not case.repeats:
        found.append(f"{where}: {case.length - len(counts)} samples never read")
    return found


def _resumed(case: Case, ranks: list[dict[str, Any]], rank: int) -> list[str]:
    given = ranks[rank]
    if given["resumed"] is None:
        return []
    wanted = [given["straight"][epoch] for epoch in range(SAVED_IN + 1, EPOCHS)]
    if any(one["stop"] < len(one["straight"][SAVED_IN]) for one in ranks):
        wanted.insert(0, given["straight"][SAVED_IN][given["stop"] :])
    names = ["the rest of the epoch", "the next epoch"][-len(wanted) :]
    return [
        f"rank {rank}: {name} differs after the resume"
        for name, one, other in zip(names, wanted, given["resumed"], strict=True)
        if one != other
    ]


# -- running -------------------------------------------------------------------------------------

Found = tuple[list[str], float]


def run(cases: Sequence[Case], at_once: int = 20) -> list[list[str]]:
    """Return what is wrong with each case, in their order."""
    found: dict[int, Found] = {}
    for places in chunks(cases, at_once):
        found |= dict(zip(places, judged([cases[place] for place in places]), strict=True))
    return [found[place][0] for place in range(len(cases))]


def chunks(cases: Sequence[Case], at_once: int) -> list[list[int]]:
    """Return the places of cases that are read together: on as many processes."""
    found = []
    for world_size in {case.world_size for case in cases}:
        places = [i for i, case in enumerate(cases) if case.world_size == world_size]
        found += [places[i : i + at_once] for i in range(0, len(places), at_once)]
    return sorted(found)


def judged(cases: list[Case]) -> list[Found]:
    """Return what is wrong with each of some cases of one world size, and its processor time."""
    with tempfile.TemporaryDirectory() as root:
        folders = [str(Path(root) / str(place)) for place in range(len(cases))]
        try:
            ranks = run_distributed(read_all, cases[0].world_size, cases, folders)
        except AssertionError as error:
            if len(cases) > 1:  # which of them
                return [found for case in cases for found in judged([case])]
            return [([f"the ranks did not end: {str(error)[-200:]}"], 0.0)]
    return [
        (problems(case, [rank[number] for rank in ranks]), sum(r[number]["cpu"] for r in ranks))
        for number, case in enumerate(cases)
    ]


def run_jobs(
    cases: Sequence[Case], jobs: int, tell: Callable[[int, Case, Found], None], at_once: int = 10
) -> None:
    """Judge cases in `jobs` processes at a time, each with workers of its own.

    Args:
        cases: what to judge.
        jobs: how many chunks are read at the same time.
        tell: called with place, case and what was found, as soon as it is.
        at_once: cases in a chunk.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as executor:
        waiting = {
            executor.submit(judged, [cases[place] for place in places]): places
            for places in chunks(cases, at_once)
        }
        for done in as_completed(waiting):
            for place, found in zip(waiting[done], done.result(), strict=True):
                tell(place, cases[place], found)
        for _ in range(jobs):
            executor.submit(close_pools)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


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
