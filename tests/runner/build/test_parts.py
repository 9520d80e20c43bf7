"""From a recipe to objects: factories, their arguments, and what fits together."""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from accel.errors import ConfigError
from runner.build import parts
from runner.config.schema import Recipe, Trainer
from runner.factories import signatures
from runner.factories.registry import Registry, register
from runner.training.callback import Callback
from runner.training.step import Step, SupervisedStep

RECIPE: dict[str, Any] = {
    "step": {"name": "supervised"},
    "model": {"name": "cnn", "width": 4},
    "data": {"name": "digits", "num_variants": 1},
    "objective": {"name": "classification"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "scheduler": {"name": "cosine"},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{**RECIPE, **changes})


def problems(**changes: Any) -> list[str]:
    return [str(problem) for problem in parts.check_factories(recipe(**changes))]


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget what a test registers."""
    before = {k: dict(getattr(register, k)._factories) for k in ("model", "step", "callback")}
    yield
    for kind, factories in before.items():
        getattr(register, kind)._factories.clear()
        getattr(register, kind)._factories.update(factories)


def test_the_parts_of_a_recipe() -> None:
    torch.manual_seed(0)
    built = parts.build_parts(recipe(callbacks={"early_stopping": {}}))
    assert isinstance(built.step, SupervisedStep)
    assert len(built.data.train) > 1000  # type: ignore[arg-type]
    assert list(built.callbacks) == ["early_stopping"]
    assert isinstance(built.callbacks["early_stopping"], Callback)
    optimizer = built.step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    schedule = built.step.make_schedulers(10)["optimizer"]
    assert schedule.optimizer is optimizer


def test_targets_get_parameters_and_the_optimizer() -> None:
    built = parts.build_parts(
        recipe(
            optimizer={"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9},
            scheduler={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3},
        )
    )
    optimizer = built.step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5
    schedule = built.step.make_schedulers(10)["optimizer"]
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    assert schedule.step_size == 3


def test_no_scheduler_is_a_constant_rate() -> None:
    assert parts.build_parts(recipe(scheduler=None)).step.make_schedulers(10) == {}


def test_nested_targets_are_built(registered: None) -> None:
    @register.model("holder_a")
    def holder(inner: Any, size: int = 1) -> torch.nn.Module:
        assert isinstance(inner["layers"][0], torch.nn.Linear)
        return torch.nn.Sequential(*inner["layers"])

    layers = [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}]
    model = {"name": "holder_a", "inner": {"layers": layers}}
    step = parts.build_step(recipe(model=model))
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
        ({"model": {"name": "cnm"}}, "model.name='cnm': no model factory has that name. Did you"),
        (
            {"model": {"name": "cnn", "widht": 3}},
            "model.widht=3: cnn has no such argument. Did you",
        ),
        ({"model": {"name": "cnn", "width": "wide"}}, "model.width='wide': it is of type int"),
        ({"model": {"name": "cnn", "_args_": [1]}}, "model._args_=[1]: cnn has no such argument"),
        ({"model": {"width": 3}}, "nothing is chosen"),
        ({"model": {"name": "cnn", "_target_": "torch.nn.Linear"}}, "not both"),
        ({"model": "cnn"}, "Write model.name=cnn"),
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 1}}, "Linear needs it"),
        ({"model": {"_target_": "wine.MLP"}}, 'imports = ["wine"]'),
        ({"optimizer": {"name": "adamw", "model": 1}}, "adamw has no such argument"),
        ({"optimizer": {"_target_": "torch.optim.SGD", "params": 1}}, "SGD has no such argument"),
        ({"scheduler": {"name": "cosine", "num_steps": 1}}, "cosine has no such argument"),
        ({"callbacks": {"early_stoping": {}}}, "callbacks.early_stoping.name='early_stoping'"),
        ({"callbacks": ["early_stopping"]}, "it maps names to factories"),
        ({"data": None}, "data=null: a run needs it"),
        ({"step": None}, "step=null: a run needs it"),
        ({"model": None}, "model=null with step=supervised: supervised needs a model"),
        ({"step": {"name": "supervised", "model": 1}}, "supervised has no such argument"),
    ],
)
def test_a_wrong_reference_is_named(changes: dict[str, Any], expected: str) -> None:
    (only,) = problems(**changes)
    assert expected in only


def test_a_step_refuses_parts_it_would_not_use() -> None:
    found = problems(step={"name": "gan"})
    assert len(found) == 4
    assert "scheduler=cosine with step=gan: gan builds its own" in found[3]


def test_a_callback_is_switched_off_by_null() -> None:
    assert problems(callbacks={"early_stopping": None}) == []
    assert parts.build_parts(recipe(callbacks={"early_stopping": None})).callbacks == {}


def test_building_checks_again() -> None:
    with pytest.raises(ConfigError, match="no such argument"):
        parts.build_parts(recipe(model={"name": "cnn", "widht": 3}))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    trainer = Trainer(global_batch_size=10, micro_batch_size=4)
    (only,) = parts.check_machine(recipe(trainer=trainer))
    assert "10" in str(only)
    assert "4" in str(only)


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
    found = signatures.check(signatures.read(scalars), arguments, "f", "scalars")
    assert [problem.value for problem in found] == wrong


def bare(
    a: typing.List = (),  # type: ignore[type-arg, assignment]  # noqa: UP006
    b: typing.Tuple = (),  # type: ignore[type-arg]  # noqa: UP006
    c: typing.Sequence = (),  # type: ignore[type-arg]
    d: typing.Optional[typing.List] = None,  # type: ignore[type-arg]  # noqa: UP006, UP045
    e: tuple[()] = (),
) -> None:
    """Take sequences of any elements, and one of none."""


@pytest.mark.parametrize("value", [[], [1, "x"], [[1]]])
def test_a_sequence_without_a_type_of_its_elements_has_any(value: list[Any]) -> None:
    signature = signatures.read(bare)
    assert signatures.check(signature, dict.fromkeys("abcd", value), "f", "bare") == []
    found = signatures.check(signature, {**dict.fromkeys("abcd", 3), "e": [1]}, "f", "bare")
    assert [problem.value for problem in found] == ["f.a=3", "f.b=3", "f.c=3", "f.d=3", "f.e=[1]"]


def test_a_signature_without_one_takes_anything() -> None:
    assert signatures.check(signatures.read(dict), {"x": 1}, "f", "dict") == []


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
    model = parts._part(recipe(model={"name": "callable_a", "width": 3}), "model")()
    assert model.weight.shape == (3, 3)


def test_a_name_of_another_callable_is_refused_by_what_has_it(registered: None) -> None:
    register.model("callable_a")(functools.partial(linear, 3, bias=False))
    rule = r"the name belongs to \S*test_parts:linear\(3, bias=False, …\)"
    with pytest.raises(ConfigError, match=rule):
        register.model("callable_a")(functools.partial(linear, 4))
    with pytest.raises(ConfigError, match=rf"on \S*test_parts:Maker\(\): {rule}"):
        register.model("callable_a")(Maker())


def test_names_are_listed_without_importing() -> None:
    registry = Registry("model", {"far": "not_there:at_all"})
    assert registry.names() == ["far"]
    assert "not_there" not in sys.modules


class OwnStep(Step):
    """Has a constructor of its own."""

    def __init__(self, model: torch.nn.Module, rate: float = 0.1) -> None:
        self.models, self.optimizers, self.rate = {"model": model}, {}, rate

    def train(self, accelerator: Any, window: Any, trainer: Any) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self, batch: Any) -> dict[str, torch.Tensor]:
        return {}

    def summarize(self, values: Any) -> dict[str, float]:
        return {}


def test_a_step_of_the_users_own(registered: None, tmp_path: Path) -> None:
    register.step("own_a")(OwnStep)
    changes: dict[str, Any] = {"objective": None, "optimizer": None, "scheduler": None}
    step = parts.build_step(recipe(step={"name": "own_a", "rate": 0.5}, **changes))
    assert isinstance(step, OwnStep)
    assert step.rate == 0.5
    assert len(problems(step={"name": "own_a"})) == 3


class HandsOn(SupervisedStep):
    """Hands on what it does not name."""

    def __init__(self, rate: float = 0.1, **parts: Any) -> None:
        super().__init__(**parts)
        self.rate = rate


@pytest.mark.parametrize("scheduler", [RECIPE["scheduler"], None], ids=["cosine", "null"])
def test_a_step_that_hands_on_what_it_is_given(registered: None, scheduler: Any) -> None:
    register.step("hands_on")(HandsOn)
    found = recipe(step={"name": "hands_on", "rate": 0.5}, scheduler=scheduler)
    assert parts.check_factories(found) == []
    step = parts.build_step(found)
    assert isinstance(step, HandsOn)
    assert step.rate == 0.5
    assert isinstance(step.optimizers["optimizer"], torch.optim.AdamW)
    assert bool(step.make_schedulers(10)) is (scheduler is not None)


def test_a_schedule_that_fails_at_its_first_step_names_its_keys() -> None:
    wrong = recipe(scheduler={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 0})
    (only,) = parts.try_factories(wrong)
    assert "scheduler.step_size=0: ZeroDivisionError" in str(only)
    for right in ({"name": "cosine"}, {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}):
        assert parts.try_factories(recipe(scheduler=right)) == []
