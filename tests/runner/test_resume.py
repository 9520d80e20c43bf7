"""The recipe of a resumed run: the frozen one, plus what the new command line changes."""

from __future__ import annotations

from runner.resume import carry_over, without_limits


def test_without_new_overrides_the_frozen_recipe_stays() -> None:
    frozen = {"lr": 1, "trainer": {"epochs": 5}}
    today = {"lr": 2, "trainer": {"epochs": 9}}  # the files have changed since
    assert carry_over(frozen, today, today) == frozen


def test_a_new_override_is_taken_and_nothing_else() -> None:
    frozen = {"lr": 1, "trainer": {"epochs": 5, "log": 1}}
    before = {"lr": 2, "trainer": {"epochs": 9, "log": 1}}
    after = {"lr": 2, "trainer": {"epochs": 20, "log": 1}}
    assert carry_over(frozen, before, after) == {"lr": 1, "trainer": {"epochs": 20, "log": 1}}


def test_a_new_group_replaces_a_node_of_other_shape() -> None:
    frozen = {"scheduler": {"name": "cosine", "warmup": 3}}
    before = {"scheduler": {"name": "cosine", "warmup": 3}}
    assert carry_over(frozen, before, {"scheduler": None}) == {"scheduler": None}
    after = {"scheduler": {"name": "linear"}}
    assert carry_over(frozen, before, after) == {"scheduler": {"name": "linear"}}


def test_limits_of_one_invocation_are_not_inherited() -> None:
    frozen = {"resume": "x", "trainer": {"stop_after": 5, "max_time": 3, "epochs": 2}}
    kept = without_limits(frozen)
    assert kept == {"resume": None, "trainer": {"stop_after": None, "max_time": None, "epochs": 2}}
    assert frozen["trainer"]["stop_after"] == 5
