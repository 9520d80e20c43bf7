"""C1: what a recipe names as a factory, and the arguments that it gives, are checked."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch

from accel.machine.errors import ConfigError, Problem
from runner.recipe import factory, serialization
from runner.recipe.factory import register
from runner.recipe.schema import Recipe
from runner.training import build
from tests.runner.training.test_build import problems, recipe


def scalars(
    a: int, b: float = 1.0, c: bool = False, d: str | None = None, e: Literal["x", "y"] = "x"
) -> None:
    """Take one argument of each type that YAML can tell."""


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"a": 1, "b": 2, "c": True, "d": None, "e": "y"}, []),
        ({"a": 1.5}, ["f.a=1.5"]),
        ({"a": True}, ["f.a=True"]),
        ({"a": 1, "b": "x", "c": 0, "d": 3, "e": "z"}, ["f.b='x'", "f.c=0", "f.d=3", "f.e='z'"]),
        ({}, ["f.a"]),
        ({"a": 1, "z": 1}, ["f.z=1"]),
    ],
)
def test_arguments_against_a_signature(arguments: dict[str, Any], wrong: list[str]) -> None:
    found = factory.Factory("f", "scalars", True, scalars, arguments)
    assert [problem.value for problem in found.problems()] == wrong


def test_nodes_that_are_null_name_nothing() -> None:
    recipe = Recipe(model={"name": "cnn"}, callbacks={"a": {"patience": 2}, "b": None})
    wrong: list[Problem] = []
    found = {key: node for key, node, _ in factory.nodes_of(recipe, wrong)}
    assert wrong == []
    assert found["model"] == {"name": "cnn"}
    assert found["callbacks.a"] == {"name": "a", "patience": 2}
    assert not {"callbacks.b", "scheduler"} & set(found)


def test_nested_targets_are_built(registered: None) -> None:
    @register.model("holder_a")
    def holder(inner: Any, size: int = 1) -> torch.nn.Module:
        assert isinstance(inner["layers"][0], torch.nn.Linear)
        return torch.nn.Sequential(*inner["layers"])

    layers = [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}]
    model = {"name": "holder_a", "inner": {"layers": layers}}
    step = build.build_step(recipe(model=model))
    assert step.models["model"][0].out_features == 3  # type: ignore[index,union-attr]


def test_nested_targets_are_checked(registered: None) -> None:
    register.model("holder_b")(lambda inner: torch.nn.Identity())
    found = problems(
        model={"name": "holder_b", "inner": [{"_target_": "os.system", "command": ""}]}
    )
    assert len(found) == 1
    assert "model.inner[0]._target_=os.system: the package 'os' is not trusted" in found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"name": "cnn", "width": "wide"}}, "model.width='wide': it is of type int"),
        ({"model": {"width": 3}}, "nothing is chosen"),
        ({"model": {"name": "cnn", "_target_": "torch.nn.Linear"}}, "not both"),
        ({"model": "cnn"}, "Write model.name=cnn"),
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 1}}, "Linear needs it"),
        ({"model": {"_target_": "wine.MLP"}}, 'imports = ["wine"]'),
        ({"optimizer": {"_target_": "torch.optim.SGD", "params": 1}}, "SGD has no such argument"),
        ({"callbacks": {"early_stoping": {}}}, "callbacks.early_stoping.name='early_stoping'"),
        ({"callbacks": ["early_stopping"]}, "it maps names to factories"),
        ({"data": None}, "data=null: a run needs it"),
        ({"model": None}, "model=null with step=supervised: supervised needs a model"),
    ],
)
def test_a_wrong_reference_is_named(changes: dict[str, Any], expected: str) -> None:
    (only,) = problems(**changes)
    assert expected in only


def test_a_value_that_torch_refuses_names_its_key() -> None:
    optimizer = {"_target_": "torch.optim.SGD", "lr": -1}
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1: Invalid learning rate: -1\."):
        build.build_step(recipe(optimizer=optimizer))


def test_a_recorded_recipe_holds_all_arguments(registered: None) -> None:
    """C2, R8: a default that changes in code changes no recorded run."""

    @register.model("tuple_a")
    def shaped(size: tuple[int, ...] = (4, 1), activation: Any = torch.relu) -> torch.nn.Module:
        return torch.nn.Linear(*(*size, True))

    given = recipe(model={"name": "tuple_a"}, callbacks={"early_stopping": {"patience": 2}})
    plain: Any = serialization.frozen_plain(given)
    assert plain["model"] == {"name": "tuple_a", "size": [4, 1]}
    assert plain["step"] == {"name": "supervised"}
    assert plain["optimizer"]["weight_decay"] == 0.01
    assert plain["callbacks"]["early_stopping"]["min_delta"] == 0.0
    recorded = serialization.from_plain(plain)
    assert factory.check_factories(recorded) == []
    assert build.build_step(recorded).models["model"].in_features == 4  # type: ignore[union-attr]


def test_an_error_of_the_users_own_code_stays_itself(registered: None) -> None:
    @register.model("raises_a")
    def raises() -> torch.nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        build.build_step(recipe(model={"name": "raises_a"}))
    assert error.value.__notes__ == ["It was raised while model.name=raises_a was built."]


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
    "made",
    [
        functools.partial(linear, bias=False),
        functools.partial(functools.partial(linear), bias=False),
        Maker(),
        functools.partial(Maker()),
    ],
    ids=["partial", "nested", "instance", "partial instance"],
)
def test_any_callable_is_registered_and_checked(made: Any, registered: None) -> None:
    assert register.model("callable_a")(made) is made
    register.model("callable_a")(made)
    assert problems(model={"name": "callable_a", "width": 3}) == []
    assert "it is of type int" in problems(model={"name": "callable_a", "width": "3"})[0]
    assert "no such argument" in problems(model={"name": "callable_a", "width": 3, "a": 1})[0]
    model = build._factory(recipe(model={"name": "callable_a", "width": 3}), "model")()
    assert model.weight.shape == (3, 3)


def test_the_mode_of_a_scheduler_has_no_default(registered: None) -> None:
    """C2: left out, it follows the metric of the run."""
    node = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    found = factory.completed(recipe(scheduler=node)).scheduler
    assert found["factor"] == 0.1
    assert "mode" not in found
