"""Streams that ranks do not see alike are warned of, all others are read in silence."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accel.comm.ops import gather_object
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.data.stream_checks import shards_by_rank, shards_by_worker, worker_problems
from accel.machine.errors import ConfigError
from accel.state import PartialState
from tests.helpers import run_distributed


class Numbers(IterableDataset):
    def __init__(self, items=range(40)) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


class ByRank(Numbers):
    def __iter__(self):
        return itertools.islice(self.items, dist.get_rank(), None, dist.get_world_size())


class ByEnvironment(Numbers):
    def __iter__(self):
        rank, count = PartialState().process_index, int(os.environ.get("WORLD_SIZE", 2))
        return (item for number, item in enumerate(self.items) if number % count == rank)


class ByAttribute(Numbers):
    """Shares out only if it is told to."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        return itertools.islice(self.items, self.rank, None, self.world_size)


class Shuffled(Numbers):
    """Draws an order from a generator of its own, seeded by rank or not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator_of_order = random.Random(seed)

    def __iter__(self):
        items = list(self.items)
        self.generator_of_order.shuffle(items)
        for item in items:
            yield {"text": f"number {item}", "x": torch.full((3,), float(item))}


class Augmented(Numbers):
    def __init__(self, labels: bool, often: float = 1.0) -> None:
        super().__init__()
        self.labels = labels
        self.often = often

    def __iter__(self):
        for item in self.items:
            noise = torch.randn(3) * (torch.rand(()) < self.often)
            image = torch.full((3,), float(item)) + noise
            yield (image, item % 5) if self.labels else image


class Logging(Numbers):
    """Asks for its rank, and does not shard."""

    def __iter__(self):
        for item in self.items:
            if item == 0 and PartialState().process_index == 0:
                str(dist.get_rank())
            yield item


class Regions(Numbers):
    """Reads fields that are called like what ranks are told apart by."""

    def __init__(self) -> None:
        super().__init__([{"rank": 3, "region": "world", "x": n} for n in range(40)])
        self.noise = [random.random() for _ in range(40)]
        self.levels = torch.rand(40)

    def __iter__(self):
        for row in self.items:
            if row["region"] == "world":
                yield row["rank"] + row["x"]


class Files(IterableDataset):
    """Of which each rank reads some, whose samples are alike in all but one field."""

    def __iter__(self):
        for number in range(dist.get_rank(), 8, dist.get_world_size()):
            for line in range(8):
                yield torch.tensor([number * 8.0 + line]), line % 2


class Whole(ByRank):
    """Names both and yields everything."""

    same_on_every_rank = True

    def __iter__(self):
        assert dist.get_rank() < dist.get_world_size()
        return iter(self.items)


def seeded(seed: int, kind, *arguments):
    torch.manual_seed(seed)
    return kind(*arguments)


def rank() -> int:
    return PartialState().process_index


def differing() -> dict[str, IterableDataset]:
    return {
        "by rank": ByRank(),
        "by environment": ByEnvironment(),
        "by attribute": ByAttribute(rank(), 2),
        "items by rank": Numbers(list(range(rank(), 40, 2))),
        "shuffled apart": Shuffled(rank()),
        "files by rank": Files(),
        "short": Numbers(range(1 if rank() else 40)),
        "empty": Numbers(range(0 if rank() else 40)),
    }


def alike() -> dict[str, IterableDataset]:
    return {
        "numbers": Numbers(),
        "constant": Numbers([7] * 40),
        "shuffled alike": Shuffled(3),
        "augmented with labels": seeded(rank(), Augmented, True),
        "augmented": seeded(rank(), Augmented, False),
        "augmented now and then": seeded(rank(), Augmented, False, 0.5),
        "unsharded": ByAttribute(),
        "logging": Logging(),
        "fields": Regions(),
        "declared": Whole(),
        "short on all": Numbers(range(1)),
        "empty on all": Numbers(range(0)),
    }


def warnings_of(make, dispatch: bool, batch_size: int | None = 4, workers: int = 0) -> dict:
    PartialState(cpu=True)
    found = {}
    for name, data in make().items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own = DataLoader(data, batch_size=batch_size, num_workers=workers)
            loader = prepare_data_loader(own, dispatch_batches=dispatch)
            for _ in range(2):
                for _ in loader:
                    pass
                PartialState().wait_for_everyone()  # ranks look for the others' and do not wait
        found[name] = [str(entry.message) for entry in caught if entry.category is UserWarning]
    return found


@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_streams_that_differ_between_ranks_are_warned_of_once(batch_size) -> None:
    for found in run_distributed(warnings_of, 2, differing, False, batch_size):
        # With two samples in a round, or one in hand of it, the first may be alike by chance.
        for name, told in found.items():
            assert len(told) == 1, (name, told)
            if name in ("by rank", "by environment", "by attribute", "files by rank"):
                assert "its code uses the rank and the number of processes" in told[0]
            else:
                assert "differ between ranks" in told[0] or "samples on the ranks" in told[0], name
            assert "sharded by rank already, or shuffled in another order" in told[0]
            assert "same_on_every_rank = True" in told[0]


def test_streams_that_worker_processes_read_are_compared() -> None:
    for found in run_distributed(warnings_of, 2, by_workers, False, 4, 1):
        assert [len(told) for told in found.values()] == [1, 0]


def peeked() -> list[Any]:
    state = PartialState(cpu=True)
    own = DataLoader(Numbers([torch.tensor([float(n)]) for n in range(16)]), batch_size=4)
    loader = prepare_data_loader(own, dispatch_batches=False)
    if state.process_index == 0:
        next(iter(loader))
    found = gather_object([f"rank {state.process_index}"])
    return [*found, *torch.cat(list(loader)).flatten().tolist()]


def test_one_rank_may_look_at_a_batch() -> None:
    """No collective lies in a pass over a stream: it would meet with one of the caller's."""
    first, second = run_distributed(peeked, 2)
    assert first == ["rank 0", "rank 1", *range(4), *range(8, 12)]
    assert second == ["rank 0", "rank 1", *range(4, 8), *range(12, 16)]


def by_workers() -> dict[str, IterableDataset]:
    return {"differing": Numbers(list(range(rank(), 40, 2))), "alike": Shuffled(3)}


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams_that_ranks_see_alike_are_read_in_silence(dispatch: bool) -> None:
    for found in run_distributed(warnings_of, 2, alike, dispatch):
        assert found == {name: [] for name in found}


def test_streams_that_shard_by_rank_are_warned_of_where_the_main_process_reads() -> None:
    for found in run_distributed(warnings_of, 2, differing, True):
        silent = [name for name, told in found.items() if not told]
        assert silent == ["shuffled apart", "empty"]  # it reads all of these
        for name in set(found) - set(silent):
            assert len(found[name]) == 1
            assert "the samples of the others are never read" in found[name][0]


class Split(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self._distributed = SimpleNamespace(rank=0, world_size=2)


def refused(dispatch: bool) -> str:
    PartialState(cpu=True)
    try:
        prepare_data_loader(DataLoader(Split()), dispatch_batches=dispatch)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_data_set_that_is_split_by_node_is_refused(dispatch: bool) -> None:
    for told in run_distributed(refused, 2, dispatch):
        assert "split by node already (rank 0 of 2)" in told


def skipped_first() -> list[list]:
    PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(Numbers(), batch_size=4), dispatch_batches=False)
    rest = skip_first_batches(loader, 2)
    return [torch.cat(list(part)).tolist() for part in (rest, loader)]


def test_the_samples_are_those_of_an_unchecked_stream() -> None:
    first, second = run_distributed(skipped_first, 2)
    assert first[0] == [*range(16, 20), *range(24, 28), *range(32, 36)]
    assert sorted(first[1] + second[1]) == list(range(40))


def sharding_stage(samples, rank=0, world_size=2):
    yield from itertools.islice(samples, rank, None, world_size)


def seed_of_rank(rank=0, world_size=2):
    return rank + world_size


class Pipeline(IterableDataset):
    def __init__(self, *stages) -> None:
        self.stages = stages

    def __iter__(self):
        return iter(self.stages)


def test_stages_are_looked_through() -> None:
    assert shards_by_rank(Pipeline(Numbers(), sharding_stage))
    assert shards_by_rank(Pipeline(ByRank()))
    assert not shards_by_rank(Pipeline(Numbers(), seed_of_rank))
    assert not shards_by_rank(Pipeline(Numbers(), Logging()))
    assert not shards_by_rank(Pipeline(ByAttribute()))


def of_pipe() -> str:
    pipe = IterableWrapper(list(range(16))).shuffle().sharding_filter()
    try:
        prepare_data_loader(DataLoader(pipe, batch_size=2))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_data_pipe_of_several_processes_is_refused() -> None:
    """Torch's loader waits in a collective of its own that ranks which do not read never enter."""
    for told in run_distributed(of_pipe, 2):
        assert "a data pipe of torch for 2 processes" in told


# -- worker processes ----------------------------------------------------------------------------


class ByWorker(Numbers):
    """Shards its numbers by worker."""

    shards_by_worker = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(self.items, start, None, step)


class Around(IterableDataset[int]):
    def __init__(self, inner: IterableDataset[int]) -> None:
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class Undeclared(ByWorker):
    shards_by_worker = None


class Counted(Numbers):
    """Counts its shards, as data sets of Hugging Face do."""

    num_shards = 4


def test_the_declaration_of_a_data_set_or_of_those_that_it_holds_counts() -> None:
    assert shards_by_worker(ByWorker()) is True
    assert shards_by_worker(Counted()) is True
    assert shards_by_worker(IterableWrapper([1])) is True
    assert shards_by_worker(Around(Around(ByWorker()))) is True
    assert shards_by_worker(Pipeline([ByWorker(), Counted()])) is True
    assert shards_by_worker(Numbers()) is None
    assert shards_by_worker(Undeclared()) is None
    assert shards_by_worker(Pipeline([ByWorker(), Numbers()])) is None
    declared = Around(ByWorker())
    declared.shards_by_worker = False
    assert shards_by_worker(declared) is False
    assert shards_by_worker(Pipeline([ByWorker(), declared])) is False


def test_workers_of_an_undeclared_stream_are_warned_of() -> None:
    for stream in (Numbers(), Undeclared(), Around(Numbers())):
        with pytest.warns(UserWarning, match="each of them comes 2 times") as caught:
            assert worker_problems(stream, 2) == []
        assert "shards_by_worker = True" in str(caught[0].message)


def test_workers_that_repeat_samples_by_declaration_are_a_problem() -> None:
    stream = Numbers()
    stream.shards_by_worker = False
    (problem,) = worker_problems(stream, 2)
    assert "each sample would come 2 times" in str(problem)
    assert "num_workers=1" in str(problem)


def test_workers_that_may_divide_the_samples_are_no_problem() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worker_problems(Numbers(), 1) == []
        assert worker_problems(ByWorker(), 2) == []
        assert worker_problems(Numbers(), 2, worker_init_fn=print) == []
