"""E1: libraries for the public package train the same on `accel`: losses, weights, files."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.libraries.cells import Cell, matrix
from tests.libraries.running import Comparison, Outcome, compare
from tests.tiers import one_in

WHOLE = "test_a_library_trains_the_same"
ONE = Cell("transformers_trainer", "any", 1)


@functools.cache
def compared(cells: tuple[Cell, ...]) -> dict[Cell, Comparison]:
    """Return the comparisons of cells of one number of processes, which are run together, once."""
    return {one.cell: one for one in compare(cells)}


def with_as_many(cell: Cell, chosen: Iterable[pytest.Item]) -> tuple[Cell, ...]:
    """Return the cells, among those of tests that are `chosen`, that can be run along with one."""
    tests: list[Any] = [item for item in chosen if getattr(item, "originalname", "") == WHOLE]
    cells: list[Cell] = [item.callspec.params["cell"] for item in tests]
    runnable = (each for each in cells if each.reason_not_to_run() is None)
    return tuple(each for each in runnable if each.num_processes == cell.num_processes)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("cell", one_in(12, matrix(), lambda cell: cell.name, first=1))
def test_a_library_trains_the_same(cell: Cell, request: pytest.FixtureRequest) -> None:
    reason = cell.reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    one = compared(with_as_many(cell, request.session.items))[cell]
    assert (one.ours.error, one.public.error) == ("", "")
    assert one.differences == {}
    assert one.ours.numbers[0]["loss"]


def comparison(ours: dict[str, list], public: dict[str, list], tolerance: float) -> Comparison:
    cell = Cell("transformers_trainer", "any", 1, tolerance=tolerance)
    return Comparison(cell, Outcome([ours]), Outcome([public]))


@pytest.mark.parametrize(
    ("ours", "public", "tolerance", "names"),
    [
        ({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.0]}, 0.0, []),
        ({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.1]}, 0.0, ["loss"]),
        ({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.1]}, 0.2, []),
        ({"loss": [1.0]}, {"loss": [1.0, 2.0]}, 0.2, ["loss"]),
        ({"loss": [1.0], "files": ["a"]}, {"loss": [1.0], "files": ["a", "b"]}, 0.0, ["files"]),
        ({"loss": [1.0]}, {"loss": [1.0], "eval_loss": [1.0]}, 0.0, ["eval_loss"]),
    ],
)
def test_differences_are_found(
    ours: dict[str, list], public: dict[str, list], tolerance: float, names: list[str]
) -> None:
    found = comparison(ours, public, tolerance)
    assert list(found.differences) == names
    assert found.is_equal == (not names)


def test_a_failure_is_no_equality() -> None:
    both = Outcome([{}], error="it failed")
    assert not Comparison(ONE, both, both).is_equal
