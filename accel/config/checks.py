"""Checks of single fields of a configuration, shared by the dataclasses of this package."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass
from numbers import Integral, Real
from typing import Any, Self

from accel.machine.enums import BaseEnum
from accel.machine.errors import ConfigError, Problem, Problems, unknown_choice

# By annotation: the types that such a field takes, the rule, and an example.
_KINDS: dict[str, tuple[type, str, str]] = {
    "bool": (bool, "expected true or false", "Give True or False."),
    "int": (Integral, "it is a whole number", "Give {name}=1, say."),
    "float": (Real, "it is a number", "Give {name}=1.0, say."),
}


def check_types(
    owner: Any, problems: list[Problem], *, where: str | None = None, skip: Collection[str] = ()
) -> None:
    """Add a problem for each field annotated bool, int or float that has a value of another type.

    For true and false, 1 and 0 and NumPy's booleans are taken, too, and turned into Python's. None
    is valid where the annotation has it, and so is a field's default, whatever it is.

    Args:
        owner: a dataclass.
        problems: what is found is added.
        where: name before each field's; None: the class and a dot.
        skip: fields that are checked elsewhere.
    """
    prefix = f"{type(owner).__name__}." if where is None else where
    for field in dataclasses.fields(owner):
        name, value = field.name, getattr(owner, field.name)
        kind, _, optional = str(getattr(field.type, "__name__", field.type)).partition(" | ")
        if name in skip or kind not in _KINDS or optional not in ("", "None"):
            continue
        expected, rule, remedy = _KINDS[kind]
        if value is field.default or (value is None and optional):
            continue
        if kind == "bool" and _is_boolean(value):
            setattr(owner, name, bool(value))
        elif not isinstance(value, expected) or isinstance(value, bool):
            problems.append(Problem(f"{prefix}{name}={value!r}", rule, remedy.format(name=name)))


def _is_boolean(value: object) -> bool:
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's bear these names
        return True
    return isinstance(value, Integral) and value in (0, 1)


def check_whole(value: object, where: str, remedy: str) -> None:
    """Raise `ConfigError` unless the argument `value`, called `where`, is a whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError.of(f"{where}={value!r}", "it is a whole number", remedy)


def check_choice(owner: object, name: str, known: Iterable[str], problems: list[Problem]) -> None:
    """Add a problem unless the field `name` of `owner` is None or one of `known`."""
    value = getattr(owner, name)
    names = list(known)
    if value is not None and str(value) not in names:
        problems.append(unknown_choice(f"{type(owner).__name__}.{name}", value, names))


def check_minimum(owner: object, name: str, minimum: float, problems: list[Problem]) -> None:
    """Add a problem if the field `name` of `owner` is below `minimum`, or no number."""
    value = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}={value!r}"
    if value is None or any(problem.value == where for problem in problems):
        return
    if not isinstance(value, Real) or value < minimum:
        rule = f"it is at least {minimum}"
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


@dataclass
class FieldDefaults:
    """Mixin of a dataclass whose fields are None by default: show their meaning, remember the gap.

    `dataclasses.replace` hands `_defaulted` on, so that a replaced object knows what was not given;
    a value that equals the default counts as not given there, and as given in an assignment.
    """

    _defaulted: InitVar[Mapping[str, object] | None] = dataclasses.field(default=None, kw_only=True)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in self._shown():
            self._keep({key: held for key, held in self._shown().items() if key != name})

    def given(self, field: str) -> Any:
        """Return the value that an argument or an environment variable gave a field, or None.

        Args:
            field: its name.
        """
        return None if field in self._shown() else vars(self)[field]

    def given_fields(self) -> dict[str, Any]:
        """Return the fields by name, None where nobody gave one."""
        names = [one.name for one in dataclasses.fields(self)]
        return {name: self.given(name) for name in names}

    def with_given(self, **changes: object) -> Self:
        """Return a copy with further fields given.

        Args:
            changes: values by field.
        """
        return type(self)(**{**self.given_fields(), **changes})

    def _shown(self) -> Mapping[str, object]:
        """Return the values that fields show, though nobody gave them."""
        return vars(self).get("_defaulted") or {}

    def _keep(self, shown: Mapping[str, object]) -> None:
        vars(self)["_defaulted"] = shown

    def _hide_defaults(self, shown: Mapping[str, object] | None) -> None:
        """Set fields to None that have the value which they showed by default."""
        self._keep({})
        for name, value in (shown or {}).items():
            if vars(self)[name] == value:
                vars(self)[name] = None

    def _show_defaults(self, values: Mapping[str, object]) -> None:
        """Let fields that are None, or showed another default, read as `values`."""
        shown = self._shown()
        missing = [name for name in values if name in shown or vars(self)[name] is None]
        self._keep({**shown, **{name: values[name] for name in missing}})
        vars(self).update({name: values[name] for name in missing})
