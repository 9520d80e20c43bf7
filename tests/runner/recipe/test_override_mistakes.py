"""Overrides in another grammar: flags, bare words, numbers for true and false."""

from __future__ import annotations

import pytest

from runner.recipe import override_mistakes


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("--seed", "seed"),
        ("--trainer.max-steps", "trainer.max_steps"),
        ("epochs", "trainer.epochs"),
        ("--learning-rate", "optimizer.lr"),
        ("model.width:", "model.width"),
        ("--unheard-of", None),
        ("eval", None),
    ],
)
def test_the_key_that_a_word_stands_for(word: str, key: str | None) -> None:
    assert override_mistakes.key_for(word) == key


def test_values_behind_a_space_are_taken_out() -> None:
    words = ["seed", "3", "name=x", "trainer.epochs", "=", "5", "model=cnn", "epochs"]
    kept, problems = override_mistakes.pairs(words)
    assert kept == ["name=x", "model=cnn", "epochs"]
    assert [(problem.value, problem.remedy) for problem in problems] == [
        ("seed 3", "Write seed=3"),
        ("trainer.epochs = 5", "Write trainer.epochs=5"),
    ]


def test_a_number_is_no_switch_unless_it_is_0_or_1() -> None:
    values = {"deterministic": 2, "trainer.epochs": 2, "checkpoint.at_end": 1, "nowhere.x": 2}
    assert [problem.value for problem in override_mistakes.switches(values)] == ["deterministic=2"]
