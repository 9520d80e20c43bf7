"""Samplers of the caller's own, which may draw differently on each rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from accel import Accelerator, rng
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.utils import TorchTensorParallelPlugin
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampler_of_single_indices_is_sharded(rank: int) -> None:
    Accelerator(cpu=True)
    random.seed(1)
    order = list(Shuffled(5))
    random.seed(1)
    loader = DataLoader(list(range(5)), batch_size=None, sampler=Shuffled(5))
    loader = prepare_data_loader(loader, num_processes=2, process_index=rank)
    assert list(loader) == [*order, order[0]][rank::2]


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
