"""Parallel dimensions over every layout of up to 64 ranks (E3)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.plan.dims import AXES, ParallelDims
from accel.run.loss_normalization import normalize_loss

LARGEST = 64


def factorisations(size: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    if num_axes == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            for rest in factorisations(size // first, num_axes - 1):
                yield (first, *rest)


LAYOUTS = [
    dict(zip(AXES, sizes, strict=True))
    for world_size in range(1, LARGEST + 1)
    for sizes in factorisations(world_size, len(AXES))
]
ORDERS = list(permutations(AXES))


@given(st.sampled_from(LAYOUTS), st.sampled_from(ORDERS))
def test_ranks_and_coordinates_are_each_others_inverse(layout: Any, order: Any) -> None:
    dims = ParallelDims(**layout, order=order)
    places = [dims.coordinates_of(rank) for rank in range(dims.world_size)]
    assert [dims.rank_at(place) for place in places] == list(range(dims.world_size))
    assert all(0 <= place[axis] < dims.size(axis) for place in places for axis in AXES)


@given(st.sampled_from(LAYOUTS), st.sampled_from(ORDERS))
def test_ranks_fall_into_groups_that_compute_the_same_samples(layout: Any, order: Any) -> None:
    world = ParallelDims(**layout, order=order).world_size
    every = [ParallelDims(**layout, order=order, rank=rank) for rank in range(world)]
    groups: dict[int, list[int]] = {}
    for dims in every:
        assert dims.dp_rank_of(dims.rank) == dims.dp_rank
        groups.setdefault(dims.dp_rank, []).append(dims.rank)
    assert sorted(groups) == list(range(every[0].dp_size))
    assert {len(ranks) for ranks in groups.values()} == {every[0].model_size}
    assert every[0].dp_leaders == tuple(min(groups[dp_rank]) for dp_rank in sorted(groups))


def test_data_shards_and_averaged_gradients_are_two_numbers() -> None:
    """Two shards of data, each sequence on two ranks: gradients are averaged over four.

    The loss of a step is the sum over tokens by their number. Each rank differentiates the summed
    loss of its own tokens; the mean over `grad_size` ranks of what `normalize_loss` returns is that
    sum only with `grad_size`.
    """
    dims = ParallelDims(dp_replicate=2, cp=2)
    assert (dims.dp_size, dims.grad_size) == (2, 4)
    totals = [1.0, 2.0, 3.0, 4.0]  # summed loss of each rank's tokens
    scaled = [normalize_loss(t, 10, grad_size=dims.grad_size, num_steps=1) for t in totals]
    assert sum(scaled) / dims.grad_size == pytest.approx(sum(totals) / 10)
    wrong = [normalize_loss(t, 10, grad_size=dims.dp_size, num_steps=1) for t in totals]
    assert sum(wrong) / dims.grad_size == pytest.approx(sum(totals) / 10 / dims.cp)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tp": 0}, "at least 1"),
        ({"tp": 2, "rank": 2}, "from 0 to 1"),
        ({"order": ("tp", "dp")}, "names each of"),
    ],
)
def test_impossible_dimensions_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParallelDims(**values)
