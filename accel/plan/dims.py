"""Parallel dimensions: which rank computes what. The one table of axis names. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PP, DP_REPLICATE, DP_SHARD, CP, TP = AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = (DP_REPLICATE, DP_SHARD)
# Gradients are averaged over these: under context parallelism also over parts of a sequence.
GRADIENT_AXES = (*DATA_AXES, CP)
# Axes of a user's mesh along which ranks read the same samples, by their usual names.
_MODEL_AXES = (PP, CP, "sp", TP)


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel axes of a run, this process's rank, and what follows from them.

    Ranks are laid out over the axes in row-major order: the last axis of `order` varies fastest.

    Attributes:
        pp: pipeline stages.
        dp_replicate: replicas of the (sharded) model that read different samples.
        dp_shard: ranks that shard parameters, gradients or optimizer state, and read different
            samples.
        cp: context-parallel ranks: each computes a part of every sequence.
        tp: tensor-parallel ranks: each computes a part of the matrices, on the same samples.
        rank: of this process.
        order: the axes, outermost first.

    Raises:
        ValueError: if a size is below 1, `order` is no permutation of the axes, or the rank is not
            one of the world.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#devicemesh
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    rank: int = 0
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        wrong = {axis: self.size(axis) for axis in AXES if self.size(axis) < 1}
        if wrong:
            raise ValueError(f"{wrong}: the size of an axis is at least 1.")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order={self.order}: it names each of {AXES} once.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: it is from 0 to {self.world_size - 1}.")

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return math.prod(self.size(axis) for axis in AXES)

    @cached_property
    def coordinates(self) -> Mapping[str, int]:
        """Index of this rank along each axis."""
        return self.coordinates_of(self.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis."""
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at an index along each axis."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coordinates[axis]
        return rank

    # -- data ------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Data-parallel size: into how many parts the samples of a step are divided."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def dp_rank(self) -> int:
        """Data-parallel rank: which part of the samples this process reads."""
        return self.dp_rank_of(self.rank)

    def dp_rank_of(self, rank: int) -> int:
        """Return the data-parallel rank of a process."""
        found = self.coordinates_of(rank)
        return found[DP_REPLICATE] * self.dp_shard + found[DP_SHARD]

    @cached_property
    def dp_leaders(self) -> tuple[int, ...]:
        """The lowest rank of each data-parallel rank, in their order."""
        first = dict.fromkeys(AXES, 0)
        return tuple(
            self.rank_at({**first, DP_REPLICATE: replicate, DP_SHARD: shard})
            for replicate in range(self.dp_replicate)
            for shard in range(self.dp_shard)
        )

    # -- random draws ----------------------------------------------------------------------

    @cached_property
    def draw_rank(self) -> int:
        """Rank among those that draw numbers of their own: tensor-parallel ranks draw the same."""
        at = self.coordinates
        return (self.dp_rank * self.cp + at[CP]) * self.pp + at[PP]

    @cached_property
    def draw_leaders(self) -> tuple[int, ...]:
        """The lowest rank of each `draw_rank`, in their order."""
        every = (dataclasses.replace(self, rank=rank) for rank in range(self.world_size))
        found = {dims.draw_rank: dims.rank for dims in every if dims.coordinates[TP] == 0}
        return tuple(found[index] for index in sorted(found))

    # -- gradients and losses --------------------------------------------------------------

    @property
    def model_size(self) -> int:
        """Number of ranks that compute the same samples together."""
        return self.pp * self.cp * self.tp

    @property
    def grad_size(self) -> int:
        """Number of ranks over which gradients are averaged: data- times context-parallel."""
        return self.dp_size * self.cp


def data_parallel(world_size: int, rank: int) -> ParallelDims:
    """Return the dimensions of a run in which every process holds the model."""
    return ParallelDims(dp_replicate=world_size, rank=rank)


def data_rank_of(mesh: Any) -> tuple[int, int]:
    """Return the (data-parallel rank, size) of this process on a user's `DeviceMesh`.

    Along its axes named pp, cp, sp or tp, ranks read the same samples.
    """
    rank, size = 0, 1
    for axis in mesh.mesh_dim_names or ():
        if axis not in _MODEL_AXES:
            size *= mesh[axis].size()
            rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank, size


def gradient_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the named axes over which gradients are averaged."""
    return tuple(name for name in names if name in GRADIENT_AXES)
