"""Problems are reported together, and mistyped names answered (E5)."""

from __future__ import annotations

import pytest

from accel.machine.errors import (
    ConfigError,
    Problem,
    Problems,
    nearest,
    unknown_choice,
)


def test_problems_are_raised_together() -> None:
    problems = Problems()
    problems.raise_if()
    problems.add("a=1", "it is 2", "Give 2.")
    problems += [Problem("b=1", "it is 3", "Give 3.")]
    problems.add_not_built("c=1", "Leave it out.")
    with pytest.raises(ConfigError) as caught:
        problems.raise_if()
    assert str(caught.value).splitlines() == [
        "a=1: it is 2. Give 2.",
        "b=1: it is 3. Give 3.",
        "c=1: this version does not offer it yet. Leave it out.",
    ]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("bf61", "Did you mean 'bf16'?"),
        ("cnm", "Did you mean 'cnn'?"),
        ("zzz", "Known names: bf16, cnn."),
    ],
)
def test_a_mistyped_name_is_answered(name: str, answer: str) -> None:
    assert nearest(name, ["cnn", "bf16"]) == answer
    names_are_listed = answer.startswith("Known names")  # in the rule of a choice, too
    expected = "Choose one of them." if names_are_listed else answer
    assert unknown_choice("x", name, ["cnn", "bf16"]).remedy == expected
