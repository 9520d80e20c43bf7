"""Libraries written for the public package train the same on `accel`: losses, weights, files."""

from __future__ import annotations

import functools
import os

import pytest

from tests.libraries.cells import Cell, matrix
from tests.libraries.running import Comparison, Outcome, compare

# Continuous integration takes every n-th cell, among them one of each library.
CELLS = (
    matrix()[1 :: int(os.environ["EVERY_LIBRARY"])] if "EVERY_LIBRARY" in os.environ else matrix()
)
ONE = Cell("transformers_trainer", "any", 1)


@functools.cache
def compared(num_processes: int) -> dict[Cell, Comparison]:
    """Return the comparisons of one number of processes, which are run together, once."""
    cells = [cell for cell in CELLS if cell.num_processes == num_processes]
    runnable = [cell for cell in cells if cell.reason_not_to_run() is None]
    return {one.cell: one for one in compare(runnable)}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_library_trains_the_same(cell: Cell) -> None:
    reason = cell.reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    one = compared(cell.num_processes)[cell]
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
