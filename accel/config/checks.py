"""Checks of single fields of a configuration, shared by the dataclasses of this package."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from accel.enums import BaseEnum
from accel.errors import ConfigError, Problem, Problems, unknown_choice


def check_choice(owner: object, name: str, known: Iterable[str], problems: list[Problem]) -> None:
    """Add a problem unless the field `name` of `owner` is None or one of `known`."""
    value = getattr(owner, name)
    names = list(known)
    if value is not None and str(value) not in names:
        problems.append(unknown_choice(f"{type(owner).__name__}.{name}", value, names))


def check_minimum(owner: object, name: str, minimum: float, problems: list[Problem]) -> None:
    """Add a problem if the field `name` of `owner` is a number below `minimum`."""
    value = getattr(owner, name)
    if value is not None and value < minimum:
        where, rule = f"{type(owner).__name__}.{name}={value!r}", f"it is at least {minimum}"
        problems.append(Problem(where, rule, f"Give {name}={minimum} or more."))


def as_enum(owner: object, name: str, kind: type[BaseEnum]) -> None:
    """Turn the field `name` of `owner` from a string into its member of `kind`, or raise."""
    problems = Problems()
    check_choice(owner, name, kind.list(), problems)
    problems.raise_if()
    if getattr(owner, name) is not None:
        setattr(owner, name, kind(str(getattr(owner, name))))


def import_callable(owner: object, name: str) -> None:
    """Turn the field `name` from a dotted path (``"package.module.function"``) into the object."""
    value = getattr(owner, name)
    if value is None or callable(value):
        return
    module, _, attribute = str(value).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of(
            f"{type(owner).__name__}.{name}={value!r}",
            "it is a callable or the dotted name of one",
            f"Importing it failed with: {error}.",
        ) from error
    setattr(owner, name, found)
