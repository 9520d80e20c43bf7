"""Rows of the conformance table: one per documented callable, parameter, attribute and value.

A table file (`table/*.py`) lists the documented names of one part as `Entry` objects. Each entry
gives rows; each row names the test that exercises it, and a mutant that this test must reject:

| row | mutant |
|---|---|
| a callable | does nothing (`NoOp` says what nothing is) |
| a parameter | the caller's value is replaced by the default |
| an attribute | reads as None |
| a value of an enumeration | does not exist |
| a value that a parameter may take | is refused |
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


class NoOp(enum.Enum):
    """What a callable does when it does nothing; the mildest that still leaves callers running."""

    NONE = "returns None"
    FIRST = "returns its first argument"
    CONTEXT = "returns a context manager that does nothing"
    FIRST_IN_CONTEXT = "returns a context manager that yields its first argument"
    DECORATOR = "returns the function, or a decorator that does"
    ALL = "returns its arguments as they are (one alone, several as a tuple)"


class _Required(enum.Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required.REQUIRED


@dataclass(frozen=True)
class P:
    """One documented parameter.

    Args:
        default: what the documentation gives; `REQUIRED` if nothing.
        test: name of the test that passes another value, and fails if it does not arrive.
        keyword: whether it is one of ``**kwargs`` in the signature (documented by name only).
    """

    default: Any
    test: str
    keyword: bool = False


def given(test: str, /, **defaults: Any) -> dict[str, P]:
    """Return parameters with their documented defaults that one test exercises."""
    return {name: P(default, test) for name, default in defaults.items()}


def required(test: str, *names: str) -> dict[str, P]:
    """Return parameters without a default that one test exercises."""
    return {name: P(REQUIRED, test) for name in names}


@dataclass(frozen=True)
class Entry:
    """One documented name.

    Args:
        name: where it is documented: "accel.utils:gather", "accel:Accelerator.backward".
        test: id of the test that fails if it does nothing (or, without `call`, the attribute's).
        noop: what "nothing" is.
        parameters: the documented parameters, in their documented order.
        attributes: the documented attributes (and values of an enumeration) → test.
        choices: for a parameter that takes one of a few words (or a collection of them), each
            documented word → the test that gives it.
        call: whether the name is itself something to call (a class: to build).
    """

    name: str
    test: str = ""
    noop: NoOp = NoOp.NONE
    parameters: Mapping[str, P] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    call: bool = True

    def rows(self) -> Iterator[Row]:
        """Yield the rows of this entry."""
        if self.call:
            yield Row(self.name, "call", "", self.test, self.noop)
        for name, parameter in self.parameters.items():
            yield Row(self.name, "parameter", name, parameter.test, default=parameter.default)
        kind = "value" if inspect.isclass(self.object()) and self.is_enum() else "attribute"
        for name, test in self.attributes.items():
            yield Row(self.name, kind, name, test)
        for name, values in self.choices.items():
            for value, test in values.items():
                yield Row(self.name, "choice", name, test, value=value)

    def object(self) -> Any:
        """Return what the name stands for."""
        return find(self.name)

    def is_enum(self) -> bool:
        """Return whether the name is an enumeration."""
        found = self.object()
        return inspect.isclass(found) and issubclass(found, enum.Enum)


def documented(name: str, test: str, noop: NoOp = NoOp.NONE, /, **parameters: Any) -> Entry:
    """Return the entry of a callable.

    Args:
        name: where it is documented.
        test: exercises the call, and each parameter that is given by its default alone.
        noop: what doing nothing is.
        parameters: documented defaults, or a `P` where another test exercises the parameter.
    """
    rows = {n: p if isinstance(p, P) else P(p, test) for n, p in parameters.items()}
    return Entry(name, test, noop, rows)


@dataclass(frozen=True)
class Row:
    """One thing that the documentation promises, and the test that exercises it.

    Args:
        name: the documented name that it belongs to.
        kind: "call", "parameter", "attribute", "value" or "choice".
        part: name of the parameter, attribute or value.
        test: name of the test; ``file.py::name`` where several tests have that name.
        noop: for a call, what doing nothing is.
        default: for a parameter, its documented default.
        value: for a choice, the word.
    """

    name: str
    kind: str
    part: str
    test: str
    noop: NoOp = NoOp.NONE
    default: Any = None
    value: str = ""

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"{self.name}({self.part}={self.value!r})"
        what = f".{self.part}" if self.kind in ("attribute", "value") else f"({self.part})"
        return f"{self.name}{what}"


def find(name: str) -> Any:
    """Return what "package.module:Name.attribute" stands for."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = (
            inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        )
    return found


def function_of(found: Any) -> Any:
    """Return the plain function of a method, static or class method, or a function itself."""
    return getattr(found, "__func__", found)


@cache
def tests_by_name() -> Mapping[str, list[str]]:
    """Return the files, below the checkout, of each test function; of a class ``Class::test``."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(TESTS.parent).as_posix()
        for name in _tests_in(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append(place)
    return found


def _tests_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in methods:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"):
                yield f"{node.name}::{one.name}" if isinstance(node, ast.ClassDef) else one.name


def id_of(test: str) -> str:
    """Return the pytest id of a row's test.

    Raises:
        LookupError: no test, or several, have that name.
    """
    file, _, name = test.rpartition(".py::")
    places = tests_by_name().get(name.partition("[")[0], [])
    if file:
        places = [place for place in places if place.endswith(f"/{file}.py")]
    if len(places) != 1:
        raise LookupError(f"{test} names {len(places)} tests: {' '.join(places)}")
    return f"{places[0]}::{name}"
