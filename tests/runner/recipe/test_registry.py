"""Names under which factories are registered."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

from accel.machine.errors import ConfigError
from runner.recipe.registry import Registry, register
from runner.training import build
from tests.runner.training.test_build import problems, recipe


def test_a_name_is_registered_once(registered: None) -> None:
    @register.model("twice_a")
    def first() -> None: ...

    assert register.model("twice_a")(first) is first
    with pytest.raises(ConfigError, match="the name belongs to"):

        @register.model("twice_a")
        def second() -> None: ...

    with pytest.raises(ConfigError, match="Choose another name"):
        register.model("cnn")(first)


class Maker:
    """Makes models; its annotations are not those of its call."""

    width: str = "wide"

    def __call__(self, width: int = 4) -> torch.nn.Module:
        return torch.nn.Linear(width, width)


def linear(width: int, bias: bool = True) -> torch.nn.Module:
    return torch.nn.Linear(width, width, bias)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(linear, bias=False),
        functools.partial(functools.partial(linear), bias=False),
        Maker(),
        functools.partial(Maker()),
    ],
    ids=["partial", "nested", "instance", "partial instance"],
)
def test_any_callable_is_registered_and_checked(factory: Any, registered: None) -> None:
    assert register.model("callable_a")(factory) is factory
    register.model("callable_a")(factory)
    assert problems(model={"name": "callable_a", "width": 3}) == []
    assert "it is of type int" in problems(model={"name": "callable_a", "width": "3"})[0]
    assert "no such argument" in problems(model={"name": "callable_a", "width": 3, "a": 1})[0]
    model = build._part(recipe(model={"name": "callable_a", "width": 3}), "model")()
    assert model.weight.shape == (3, 3)


def test_a_name_of_another_callable_is_refused_by_what_has_it(registered: None) -> None:
    register.model("callable_a")(functools.partial(linear, 3, bias=False))
    rule = r"the name belongs to \S*test_registry:linear\(3, bias=False, …\)"
    with pytest.raises(ConfigError, match=rule):
        register.model("callable_a")(functools.partial(linear, 4))
    with pytest.raises(ConfigError, match=rf"on \S*test_registry:Maker\(\): {rule}"):
        register.model("callable_a")(Maker())


def test_names_are_listed_without_importing() -> None:
    registry = Registry("model", {"far": "not_there:at_all"})
    assert registry.names() == ["far"]
    assert "not_there" not in sys.modules
