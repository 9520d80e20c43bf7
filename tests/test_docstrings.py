"""E1: every public name of accel has a docstring that describes its parameters."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

MODULES = ("accel", "accel.utils", "accel.data_loader", "accel.tracking", "accel.checkpointing")
SECTIONS = "Args|Returns|Yields|Raises|Attributes|Attributes: .*|Example|Source"


def _public() -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of all public names and of the public methods of classes."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            found = getattr(module, name)
            if id(found) in seen or name.isupper():  # constants have no docstrings
                continue
            seen.add(id(found))
            yield f"{module_name}.{name}", found
            if inspect.isclass(found) and not issubclass(found, enum.Enum):
                yield from _methods(f"{module_name}.{name}", found)


def _methods(owner: str, kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("accel"):
            continue
        for name, member in vars(base).items():
            visible = not name.startswith("_") and getattr(kind, name, None) is not None
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if visible and inspect.isfunction(function):
                yield f"{owner}.{name}", member


PUBLIC = dict(_public())


def _section(docstring: str, name: str) -> str:
    """Return the text below the heading `name`, up to the next heading."""
    found = re.search(rf"^{name}:\n(.*?)(?=^(?:{SECTIONS}):|\Z)", docstring, re.S | re.M)
    return found[1] if found else ""


def _described(docstring: str) -> set[str]:
    """Return the parameters that the section Args describes."""
    lines = re.findall(r"^    ([\w*][\w*, ]*):", _section(docstring, "Args"), re.M)
    names = {name.strip(" *") for line in lines for name in line.split(",")}
    return {name for name in names if name[0] != "_"}


def _parameters(found: Any) -> dict[str, inspect.Parameter]:
    if inspect.isclass(found) and found.__init__ is object.__init__:
        return {}
    function = found.__init__ if inspect.isclass(found) else getattr(found, "__func__", found)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a class of C
        return {}
    return {n: p for n, p in parameters.items() if n not in ("self", "cls") and n[0] != "_"}


@pytest.mark.parametrize("name", [n for n in PUBLIC if not isinstance(PUBLIC[n], property)])
def test_it_describes_its_parameters(name: str) -> None:
    found = PUBLIC[name]
    if inspect.isclass(found) and issubclass(found, (enum.Enum, Exception)):
        return
    wanted = set(_parameters(found))
    described = _described(inspect.getdoc(found) or "")
    assert wanted - described == set(), f"{name}: Args lacks these"
    assert described - wanted == set(), f"{name}: Args has these, the signature has not"
