"""Arguments of a recipe against the signature of a factory."""

from __future__ import annotations

import typing
from typing import Any, Literal

import pytest

from runner.recipe import signatures


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
