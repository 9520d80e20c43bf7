"""Prepared loaders on real processes (E2)."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import DataLoader

from accel.data.prepare import prepare_data_loader
from accel.state import PartialState
from tests.accel.data.parts import Stream
from tests.helpers import run_distributed


def shuffled_passes(rng_types: list[str] | None, seedable: bool) -> list[list[int]]:
    PartialState(cpu=True)
    torch.manual_seed(PartialState().process_index)  # the ranks do not agree
    loader = prepare_data_loader(
        DataLoader(range(22), batch_size=3, shuffle=True),
        rng_types=rng_types,
        use_seedable_sampler=seedable,
    )
    passes = []
    for epoch in range(3):
        torch.rand(PartialState().process_index + epoch)
        passes.append([i for batch in loader for i in batch.tolist()])
        if epoch == 1:
            for _ in loader:
                break
    return passes


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("rng_types", [None, ["torch", "generator"]])
def test_ranks_shuffle_alike_though_their_generators_differ(rng_types, seedable) -> None:
    ranks = run_distributed(shuffled_passes, 2, rng_types, seedable)
    orders = [tuple(itertools.chain(*shares)) for shares in zip(*ranks, strict=True)]
    for order in orders:
        assert sorted(set(order)) == list(range(22))
        assert len(order) == 24
    assert len(set(orders)) == 3


def plans(count: int) -> list[dict]:
    """Return dispatched loaders of every kind, the same list on every process."""
    draw = random.Random(count)
    return [
        {
            "length": draw.choice([0, 1, count - 1, count + 1, draw.randint(2, 200)]),
            "size": draw.randint(1, 9) * count,
            "streamed": draw.random() < 0.5,
            "split": draw.random() < 0.5,
            "even": draw.random() < 0.5,
            "drop_last": draw.random() < 0.5,
        }
        for _ in range(40)
    ]


def read_plans() -> list[list[list[int]]]:
    found = []
    for plan in plans(PartialState(cpu=True).num_processes):
        length = plan["length"]
        dataset = Stream(length) if plan["streamed"] else range(length)
        loader = prepare_data_loader(
            DataLoader(dataset, batch_size=plan["size"], drop_last=plan["drop_last"]),
            dispatch_batches=True,
            split_batches=plan["split"],
            even_batches=plan["even"],
        )
        found.append([batch.tolist() for batch in loader])
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_nobody_waits_and_every_sample_is_read_whatever_the_plan(count: int) -> None:
    ranks = run_distributed(read_plans, count)
    for plan, *shares in zip(plans(count), *ranks, strict=True):
        rounds = itertools.zip_longest(*shares, fillvalue=[])
        seen = [i for group in rounds for batch in group for i in batch]
        total = plan["size"] * (1 if plan["split"] else count)
        whole = plan["length"] // total * total if plan["drop_last"] else plan["length"]
        assert seen[:whole] == list(range(whole)), plan
        if plan["even"] or plan["drop_last"]:
            assert len(seen) - whole < count, plan
            assert len({tuple(map(len, share)) for share in shares}) == 1, plan
        else:
            assert len(seen) == whole, plan
