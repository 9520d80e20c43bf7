"""Nodes of a recipe that name a factory."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine.errors import ConfigError, Problem
from runner.recipe import factory_nodes as nodes
from runner.recipe import signatures
from runner.recipe.registry import register
from runner.recipe.schema import Recipe


def test_nodes_that_are_null_name_nothing() -> None:
    recipe = Recipe(model={"name": "cnn"}, callbacks={"a": {"patience": 2}, "b": None})
    wrong: list[Problem] = []
    found = {key: node for key, node, _ in nodes.nodes_of(recipe, wrong)}
    assert wrong == []
    assert found["model"] == {"name": "cnn"}
    assert found["callbacks.a"] == {"name": "a", "patience": 2}
    assert not {"callbacks.b", "scheduler"} & set(found)


def test_a_node_names_a_factory_in_one_of_two_ways() -> None:
    assert nodes.name_and_arguments("model", {"name": "cnn", "width": 3}, register.model) == (
        "cnn",
        None,
        {"width": 3},
    )
    target = {"_target_": "torch.nn.Linear", "in_features": 1}
    assert nodes.name_and_arguments("model", target, register.model)[1:] == (
        "torch.nn.Linear",
        {"in_features": 1},
    )


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        ("cnn", "Write model.name=cnn"),
        ({}, "nothing is chosen"),
        ({"name": "cnn", "_target_": "torch.nn.Linear"}, "not both"),
    ],
)
def test_a_node_that_names_none_or_two_is_refused(node: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        nodes.name_and_arguments("model", node, register.model)


def test_the_runner_gives_arguments_of_its_own() -> None:
    assert [nodes.num_given("scheduler", by_name) for by_name in (True, False)] == [2, 1]
    assert nodes.num_given("model", True) == 0


def step(model: Any, optimizer: Any = None) -> None:
    """Take a model, and perhaps an optimizer."""


def test_parts_that_a_step_lacks_or_does_not_take() -> None:
    recipe = Recipe(objective={"name": "classification"}, optimizer={"name": "adamw"})
    found = list(nodes.step_problems(recipe, "mine", signatures.read(step)))
    assert [problem.value for problem in found] == [
        "model=null with step=mine",
        "objective=classification with step=mine",
    ]
