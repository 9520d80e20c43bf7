"""Problems are reported together, and mistyped names answered (E5)."""

from __future__ import annotations

import pytest

from accel.machine.errors import (
    ConfigError,
    NotBuiltError,
    Problem,
    Problems,
    closest,
    did_you_mean,
    listed,
    nearest,
    text_of,
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
    assert not isinstance(caught.value, NotBuiltError)
    assert str(caught.value).splitlines() == [
        "a=1: it is 2. Give 2.",
        "b=1: it is 3. Give 3.",
        "c=1: this version does not offer it yet. Leave it out.",
    ]


def test_missing_options_only_are_an_error_of_their_own() -> None:
    problems = Problems()
    problems.add_not_built("c=1", "Leave it out.")
    with pytest.raises(NotBuiltError, match="c=1: this version does not offer it yet"):
        problems.raise_if()


def test_problems_of_an_error_that_was_raised_are_taken() -> None:
    wrong, missing = Problem("a", "b", "c"), Problem("d", "e", "f")
    problems = Problems()
    problems.take(NotBuiltError(missing))
    with pytest.raises(NotBuiltError):
        problems.raise_if()
    problems.take(ConfigError(wrong))
    with pytest.raises(ConfigError) as caught:
        problems.raise_if()
    assert caught.value.problems == (wrong, missing)
    assert not isinstance(caught.value, NotBuiltError)


@pytest.mark.parametrize(
    ("name", "meant"), [("fp32", "no"), ("float32", "no"), ("Bfloat16", "bf16"), ("half", "fp16")]
)
def test_what_is_called_so_elsewhere_is_answered(name: str, meant: str) -> None:
    assert nearest(name, ["no", "fp16", "bf16", "fp8"]) == f"Did you mean {meant!r}?"
    assert nearest(name, ["other"]) == "Known names: other."


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


def test_the_closest_name() -> None:
    assert closest("optimzer", ["optimizer", "model"]) == "optimizer"
    assert closest("optimzer", ["optimizer", "model"], cutoff=0.99) is None
    assert did_you_mean("a", "b") == "Did you mean 'a' or 'b'?"


def test_names_are_listed_up_to_a_number() -> None:
    names = [str(number) for number in range(22)]
    assert listed(names[:2]) == "0, 1"
    assert listed(names[:20]) == ", ".join(names[:20])
    assert listed(names) == f"{', '.join(names[:20])} and 2 more"


def test_a_message_that_cannot_be_read_is_named() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert "ValueError" in text_of(Silent())
