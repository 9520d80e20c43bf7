"""Weights of the next block, read in a thread (E4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest
import torch

from accel.weights import read_ahead
from accel.weights.read_ahead import Block, ReadAhead


class Slow(Mapping[str, torch.Tensor]):
    """Weights that tell which thread reads them."""

    def __deepcopy__(self, memo: dict[int, object]) -> Slow:
        return Slow(self.value)

    def __init__(self, value: float) -> None:
        self.value = value
        self.threads: list[str] = []
        self.begun = threading.Event()

    def __getitem__(self, key: str) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
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


def taken(ahead: ReadAhead, number: int, weights: list[Slow]) -> float | None:
    """Return what was read of a block once the thread began, None if nothing was."""
    for one in weights:
        one.begun.clear()
    found = ahead.take(number)
    following = ahead._ahead
    if following is not None:
        assert weights[following[0]].begun.wait(10)
    ahead.release()
    return found["w"].tolist()[0] if found else None


def test_the_next_block_is_read(blocks: tuple[ReadAhead, list[Slow]]) -> None:
    ahead, weights = blocks
    assert [taken(ahead, number, weights) for number in range(3)] == [None, 1.0, 2.0]
    assert [len(one.threads) for one in weights] == [0, 1, 1]
    assert all(name == "accel-read-ahead" for one in weights for name in one.threads)
    assert ahead.take(0) == {}


def test_the_order_is_learned(blocks: tuple[ReadAhead, list[Slow]]) -> None:
    ahead, weights = blocks
    for number in (0, 2, 1):
        taken(ahead, number, weights)
    assert [taken(ahead, number, weights) for number in (0, 2, 1)] == [None, 2.0, 1.0]


def test_a_failure_is_raised_where_the_weights_are_wanted(
    blocks: tuple[ReadAhead, list[Slow]],
) -> None:
    ahead, weights = blocks
    weights[1].value = -1.0
    taken(ahead, 0, weights)
    with pytest.raises(KeyError):
        ahead.take(1)


def test_a_value_that_was_set_since_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 8)
    weights = {"w": torch.zeros(3), "b": torch.zeros(3)}
    ahead = ReadAhead()
    for _ in range(2):
        ahead.register(Block(("w", "b"), weights, "cpu", 24))
    ahead.take(0)
    assert ahead._ahead is not None
    assert ahead._ahead[1]._mapped.wait(10)
    weights["w"] = torch.ones(3)
    found = ahead.take(1)
    ahead.release()
    assert found.keys() == {"b"}
