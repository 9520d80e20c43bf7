"""Counts in messages, and sizes to propose."""

from __future__ import annotations

import pytest

from runner.recipe.format_counts import counted, nearest_multiples


def test_a_count_agrees_with_its_noun() -> None:
    assert counted(1, "process", "processes") == "1 process"
    assert counted(2, "process", "processes") == "2 processes"
    assert counted(1200, "step") == "1,200 steps"


@pytest.mark.parametrize(
    ("value", "divisor", "expected"), [(10, 4, [8, 12]), (3, 4, [4]), (8, 4, [8, 12])]
)
def test_multiples_next_to_a_value_are_positive(
    value: int, divisor: int, expected: list[int]
) -> None:
    assert nearest_multiples(value, divisor) == expected
