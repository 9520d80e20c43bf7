"""Which part of the data a process computes: processes that share one replica compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel import Accelerator


@dataclass(frozen=True)
class Share:
    """This process's place among the shards of the data.

    Attributes:
        index: which shard it computes.
        count: how many shards there are.
        copies: how many processes compute the same shard (tensor parallelism), 1 without.
    """

    index: int
    count: int
    copies: int


def share_of(accelerator: Accelerator) -> Share:
    """Return the share of this process, as the engine spreads data."""
    index, count = accelerator.strategy.data_rank
    return Share(index, count, accelerator.num_processes // count)
