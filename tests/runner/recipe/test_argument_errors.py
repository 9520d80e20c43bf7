"""Which argument of a recipe the error of a factory is about."""

from __future__ import annotations

import math
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import argument_errors


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Invalid momentum value: -1.0", ["momentum"]),
        ("expected 3 channels", ["width"]),
        ("3.5 or x3 or 3x", []),
        ("unknown activation 'GELU'", ["kind"]),
        ("betas must be in [0, 1), got 2.0", ["betas"]),
        ("got 2.0", ["betas"]),
        ("nothing of it", []),
    ],
)
def test_an_error_is_about_arguments_by_name_else_by_value(text: str, names: list[str]) -> None:
    arguments = {"momentum": -1, "width": 3, "kind": "gelu", "betas": (0.9, 2), "fused": True}
    assert argument_errors.about(arguments, text) == names


def raised(error: Exception, arguments: dict[str, Any]) -> str:
    with (
        pytest.raises(ConfigError) as caught,
        argument_errors.factory_errors("model", "model=cnn", arguments),
    ):
        raise error
    return str(caught.value)


def test_an_error_of_a_factory_names_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_errors.user_frames, "has_own", lambda error: False)
    assert "model.width=0: width is too small. Correct" in raised(
        ValueError("width is too small."), {"width": 0, "depth": 1}
    )
    assert "model.width=0: ZeroDivisionError: division by zero" in raised(
        ZeroDivisionError("division by zero"), {"width": 0}
    )
    assert "model=cnn: no memory. Choose another model" in raised(ValueError("no memory"), {})


def test_errors_of_the_machine_and_of_the_users_code_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, own in ((ImportError("no such module"), False), (ValueError("mine"), True)):
        monkeypatch.setattr(argument_errors.user_frames, "has_own", lambda _, own=own: own)
        with (
            pytest.raises(type(error)) as caught,
            argument_errors.factory_errors("model", "model=cnn", {}),
        ):
            raise error
        assert caught.value.__notes__ == ["It was raised while model=cnn was built."]


def test_numbers_that_are_not_finite_are_named() -> None:
    found = argument_errors.not_finite(
        "optimizer", {"lr": math.inf, "eps": math.nan, "decay": 0.1, "n": 1}
    )
    assert [problem.value for problem in found] == ["optimizer.lr=inf", "optimizer.eps=nan"]
