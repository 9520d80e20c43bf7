"""E2: random loaders are read whole, and resumed in the order that they had.

The same ones each time; `python -m tests.loaders` draws others with a fresh seed.
"""

from __future__ import annotations

import pytest

from tests.loaders.fuzz import Case, drawn, reproducer, run

# Each was wrong once, for a reason of its own.
NAMED = {
    "another order after a resume": Case(stop=2),
    "another order after a stateful resume": Case(stateful=True, stop=2),
    "another order of a weighted sampler": Case(order="weighted", stop=1),
    "the order of the epoch that had ended": Case(seedable=True, stop=4),
    "an empty epoch after a stateful resume at the end": Case(stateful=True, stop=4),
    "one permutation for two seedable loaders": Case(seedable=True, loaders=2),
    "one permutation for two loaders on two ranks": Case(world_size=2, loaders=2, stop=1),
    "zipped loaders whose epoch stood still": Case(seedable=True, loaders=3, stop=1),
    "a shard of a shard": Case(world_size=2, order="distributed", stop=1),
    "ranks that drew different indices": Case(world_size=2, order="eager", stop=1),
    "ranks that drew different indices one by one": Case(world_size=2, order="lazy", stop=1),
    "an uneven stream that was completed": Case(
        world_size=2, streamed=True, dispatch=False, even=False, length=23, batch_size=3
    ),
    "an uneven dispatched stream of the wrong length": Case(
        world_size=2, streamed=True, dispatch=True, even=False, length=17
    ),
    "a stream that did not know epoch 0": Case(streamed=True, stop=1),
    "another order of a sampler that draws late": Case(order="lazy", loaders=2, stop=1),
    "another order of a sampler whose generator is shared": Case(order="shared", stop=1),
    "another order of a sampler with replacement": Case(order="replacement", length=40, stop=8),
    "a stream completed with other samples after a resume": Case(
        world_size=2, streamed=True, stateful=True, length=23, batch_size=3, stop=1
    ),
    "ranks saved at different batches": Case(
        world_size=2, even=False, stateful=True, dispatch=False, length=45, stop=1, ahead=2
    ),
    "a stateful loader that had skipped": Case(stateful=True, skips=1, stop=2),
    "a permutation drawn again behind the end of a pass": Case(
        world_size=2, stateful=True, length=23, stop=1
    ),
}


def assert_right(cases: list[Case]) -> None:
    wrong = {reproducer(c): found for c, found in zip(cases, run(cases), strict=True) if found}
    assert not wrong


def test_what_was_wrong_once() -> None:
    found = run(list(NAMED.values()))
    assert not {name: wrong for name, wrong in zip(NAMED, found, strict=True) if wrong}


def without_workers(count: int) -> list[Case]:
    return [case for case in drawn(1, 3 * count) if not case.workers][:count]


def test_random_loaders() -> None:
    assert_right(without_workers(8))


@pytest.mark.slow
def test_many_random_loaders() -> None:
    assert_right(drawn(2, 50))
