"""Samplers of the caller's own, which may draw differently on each rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from accel import Accelerator
from accel.comm import rng
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.utils import DataLoaderConfiguration, TorchTensorParallelPlugin, set_seed
from tests.helpers import run_distributed


class OfOwnLength:
    """Batches of which each rank has another number."""

    batch_size = 2

    def __init__(self, rank: int, knows_length: bool) -> None:
        self.batches = [[2 * i, 2 * i + 1] for i in range(9 - 2 * rank)]
        self.knows_length = knows_length

    def __len__(self) -> int:
        if not self.knows_length:
            raise TypeError("no length")
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def of_own_length(knows_length: list[bool]) -> tuple[list[list[int]], list[int]]:
    rank = Accelerator(cpu=True).process_index
    sampler: Any = OfOwnLength(rank, knows_length[rank])
    loader = prepare_data_loader(DataLoader(range(18), batch_sampler=sampler), even_batches=False)
    lengths = [len(loader)] if any(knows_length) else []
    found = [[i for batch in loader for i in batch.tolist()] for _ in range(2)]
    return found, [*lengths, *([len(loader)] if any(knows_length) else [])]


@pytest.mark.parametrize("knows_length", [[True, True], [True, False], [False, False]])
def test_rank_0_says_where_a_pass_ends(knows_length: list[bool]) -> None:
    found = run_distributed(of_own_length, 2, knows_length, timeout=120)
    for epoch in range(2):
        assert sorted(found[0][0][epoch] + found[1][0][epoch]) == list(range(18))
    if knows_length[0]:
        assert [lengths for _, lengths in found] == [[5, 5], [4, 4]]


class Shuffled(Sampler[int]):
    """The indices below `length` in an order drawn from Python's generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


def shuffled() -> Any:
    random.seed(1)
    loader = DataLoader(range(12), batch_size=2, sampler=Shuffled(12))
    return prepare_data_loader(loader, num_processes=2, process_index=0)


def test_a_resume_at_the_end_of_a_pass_draws_no_order_for_nothing() -> None:
    Accelerator(cpu=True)
    loader = shuffled()
    for number, _ in enumerate(loader, 1):
        if number == 3:
            saved, generators = loader.order_state(), rng.capture()
    wanted = [batch.tolist() for batch in loader], random.random()
    loader = shuffled()
    loader.load_order_state(saved)
    rng.restore(generators)
    assert list(skip_first_batches(loader, 3)) == []
    assert ([batch.tolist() for batch in loader], random.random()) == wanted


def drawn_with(generator: torch.Generator) -> Any:
    sampler = RandomSampler(range(12), generator=generator)
    return prepare_data_loader(DataLoader(range(12), batch_size=2, sampler=sampler))


def test_a_pass_left_early_draws_from_its_generator_to_the_end() -> None:
    Accelerator(cpu=True)
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    whole, left = drawn_with(first), drawn_with(second)
    wanted = [[batch.tolist() for batch in whole] for _ in range(2)]
    for batch in left:
        found = [batch.tolist()]
        break
    found += [batch.tolist() for batch in skip_first_batches(left, 1)]
    assert [found, [batch.tolist() for batch in left]] == wanted


class OfOwnRank:
    """Batches that are dealt already: rank 0 has [0], [1, 2], [3, 4, 5], the next what follows."""

    def __init__(self, rank: int) -> None:
        self.first = 6 * rank

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        for start, size in ((0, 1), (1, 2), (3, 3)):
            yield list(range(self.first + start, self.first + start + size))


def dealt_already() -> tuple[bool, list[list[list[int]]], int]:
    accelerator = Accelerator(cpu=True)
    sampler: Any = OfOwnRank(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(12), batch_sampler=sampler))
    shard = loader.batch_sampler
    shard.num_processes, shard.process_index = 1, 0  # as libraries say that it is dealt already
    passes = [[batch.tolist() for batch in loader] for _ in range(2)]
    passes.append([batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)])
    return shard.batch_sampler is sampler, passes, len(loader)


def test_batches_that_are_dealt_already_are_read_as_they_are() -> None:
    for rank, found in enumerate(run_distributed(dealt_already, 2)):
        own = [[0], [1, 2], [3, 4, 5]] if rank == 0 else [[6], [7, 8], [9, 10, 11]]
        assert found == (True, [own, own, own[1:]], 3)


class DealtRandomly:
    """Batches of a permutation, which each rank draws and of which it takes its own."""

    def __init__(self, rank: int, draw: str) -> None:
        self.rank = rank
        self.draw = draw

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        indices = torch.randperm(24).tolist()
        if self.draw == "python":
            indices = random.sample(range(24), 24)
        for start in range(0, 12, 2):
            yield indices[self.rank :: 2][start : start + 2]


def dealt_randomly(draw: str, folder: str) -> tuple[list[int], list[int]]:
    """Return what a rank reads in a pass, and in one that is resumed in its middle."""

    def prepared(accelerator: Accelerator) -> Any:
        sampler: Any = DealtRandomly(accelerator.process_index, draw)
        loader = accelerator.prepare(DataLoader(range(24), batch_sampler=sampler))
        loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0
        return loader

    set_seed(5)
    accelerator = Accelerator(cpu=True)
    seen: list[int] = []
    for number, batch in enumerate(prepared(accelerator), start=1):
        seen += batch.tolist()
        if number == 3:
            accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    set_seed(99)
    loader = prepared(accelerator)
    accelerator.load_state(folder)
    rest = [i for batch in accelerator.skip_first_batches(loader, 3) for i in batch.tolist()]
    return seen, seen[:6] + rest


@pytest.mark.parametrize("draw", ["torch", "python"])
def test_batches_that_are_dealt_already_are_drawn_again(tmp_path: Path, draw: str) -> None:
    ranks = run_distributed(dealt_randomly, 2, draw, str(tmp_path / "state"))
    for unbroken, resumed in ranks:
        assert resumed == unbroken
    assert sorted(ranks[0][0] + ranks[1][0]) == list(range(24))


def dealt_by_torch(kind: str) -> tuple[bool, list[int]]:
    """Return what a rank reads of a sampler of torch's that is said to deal itself."""
    accelerator = Accelerator(cpu=True)
    inner: Any = SequentialSampler(range(8))
    if kind == "distributed":
        inner = DistributedSampler(range(8), shuffle=False)
    sampler = BatchSampler(inner, 2, drop_last=False)
    loader = accelerator.prepare(DataLoader(range(8), batch_sampler=sampler))
    loader.batch_sampler.num_processes = 1
    is_own = loader.batch_sampler.batch_sampler is sampler
    return is_own, [i for batch in loader for i in batch.tolist()]


def test_samplers_of_torch_may_be_said_to_deal_themselves() -> None:
    every = list(range(8))
    assert run_distributed(dealt_by_torch, 2, "sequential") == [(True, every)] * 2
    found = run_distributed(dealt_by_torch, 2, "distributed")
    assert found == [(True, every[0::2]), (True, every[1::2])]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampler_of_single_indices_is_sharded(rank: int) -> None:
    Accelerator(cpu=True)
    random.seed(1)
    order = list(Shuffled(5))
    random.seed(1)
    loader = DataLoader(list(range(5)), batch_size=None, sampler=Shuffled(5))
    loader = prepare_data_loader(loader, num_processes=2, process_index=rank)
    assert list(loader) == [*order, order[0]][rank::2]


def of_torchs_generator(dispatch: bool) -> tuple[list[list[int]], float]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    torch.rand(3)  # of a model
    given = torch.Generator().manual_seed(3)  # of which nothing is drawn before a pass
    prepared = [
        accelerator.prepare(DataLoader(range(8), 2, shuffle=True, generator=generator))
        for generator in (None, None, given)
    ]
    drawn = torch.rand(1).item()
    found = [[i for batch in loader for i in batch.tolist()] for loader in prepared]
    accelerator.end_training()
    return found, drawn


def test_a_shuffled_loader_takes_its_seed_from_torchs_generator() -> None:
    """As torch's own sampler does in a single process, and the documented package on several."""
    set_seed(0)
    torch.rand(3)
    seeds = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(2)]
    drawn = torch.rand(1).item()
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(s)) for s in seeds]
    for rank, found in enumerate(run_distributed(of_torchs_generator, 2, False)):
        own = [order.view(4, 2)[rank::2].flatten().tolist() for order in orders]
        assert found[0][:2] == own
        assert found[1] == drawn


def test_a_dispatched_loader_leaves_torchs_generator_alone() -> None:
    set_seed(0)
    torch.rand(3)
    assert {drawn for _, drawn in run_distributed(of_torchs_generator, 2, True)} == {
        torch.rand(1).item()
    }


# -- metrics -------------------------------------------------------------------------------------


def of_single_samples() -> tuple[list[int], int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(3)), batch_size=None))
    found = [accelerator.gather_for_metrics(x.view(1)).tolist() for (x,) in loader]
    return [i for part in found for i in part], loader.total_batch_size


def test_single_samples_are_counted_once() -> None:
    assert run_distributed(of_single_samples, 2) == [([0, 1, 2], 2)] * 2


def of_shared_data(rows: int) -> list[int]:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=4))
    found = [accelerator.gather_for_metrics(x.repeat_interleave(rows)) for (x,) in loader]
    return torch.cat(found).tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_batches_that_nothing_completes_are_kept_whole(rows: int) -> None:
    wanted = [i for i in range(6) for _ in range(rows)]
    assert run_distributed(of_shared_data, 2, rows) == [wanted] * 2
