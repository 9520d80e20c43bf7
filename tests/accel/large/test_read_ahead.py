"""Weights of the next block, read in a thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch

from accel.large import read_ahead
from accel.large.read_ahead import Block, ReadAhead


class Slow(Mapping[str, torch.Tensor]):
    """Weights that tell which thread reads them."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.threads: list[str] = []

    def __getitem__(self, key: str) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        if self.value < 0:
            raise KeyError(key)
        return torch.full((3,), self.value)

    def __iter__(self) -> Iterator[str]:
        return iter(["w"])

    def __len__(self) -> int:
        return 1


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[ReadAhead, list[Slow]]:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 8)
    weights = [Slow(float(n)) for n in range(3)]
    ahead = ReadAhead()
    for one in weights:
        ahead.register(Block(("w",), one, "cpu", 12))
    return ahead, weights


def test_the_next_block_is_read(blocks: tuple[ReadAhead, list[Slow]]) -> None:
    ahead, weights = blocks
    assert ahead.take(0) == {}
    assert ahead.take(1)["w"].tolist() == [1.0] * 3
    assert ahead.take(2)["w"].tolist() == [2.0] * 3
    assert [one.threads for one in weights] == [[], ["accel-read-ahead"], ["accel-read-ahead"]]
    assert ahead.take(0) == {}


def test_the_order_is_learned(blocks: tuple[ReadAhead, list[Slow]]) -> None:
    ahead, _ = blocks
    for number in (0, 2, 1):
        ahead.take(number)
    assert ahead.take(0) == {}
    assert ahead.take(2)["w"].tolist() == [2.0] * 3
    assert ahead.take(1)["w"].tolist() == [1.0] * 3


def test_small_blocks_are_not_worth_a_thread() -> None:
    ahead, weights = ReadAhead(), Slow(1.0)
    for _ in range(2):
        ahead.register(Block(("w",), weights, "cpu", 12))
    assert ahead.take(0) == ahead.take(1) == {}
    assert weights.threads == []


def test_a_failure_is_raised_where_the_weights_are_wanted(
    blocks: tuple[ReadAhead, list[Slow]],
) -> None:
    ahead, weights = blocks
    weights[1].value = -1.0
    ahead.take(0)
    with pytest.raises(KeyError):
        ahead.take(1)


def test_a_copy_reads_for_itself(blocks: tuple[ReadAhead, list[Slow]]) -> None:
    ahead, _ = blocks
    ahead.take(0)
    other = copy.deepcopy(ahead)
    assert ahead.take(1).keys() == {"w"}
    assert other.take(1) == {}
    assert other.take(2).keys() == {"w"}
