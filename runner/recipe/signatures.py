"""Whether arguments of a recipe fit the factory that they are for. Free of torch."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from accel.machine.errors import Problem, nearest

Factory = Callable[..., object]  # a function or a class
SCALARS = (bool, int, float, str)
SEQUENCES = (list, tuple, Sequence)
# Packages whose decorators keep the signature of a function, as `torch.no_grad` does.
KEEP_SIGNATURE = ("accel", "contextlib", "functools", "runner", "torch", "typing")


@dataclass(frozen=True)
class Signature:
    """The arguments of a factory that a recipe can set: without those that the runner gives.

    `open`: any other name is taken, too. `hints` are the annotations that can be read.
    """

    parameters: Mapping[str, Parameter]
    open: bool
    hints: Mapping[str, object]


def read(factory: Factory, num_given: int = 0, given: Collection[str] = ()) -> Signature:
    """Return the arguments of `factory` that a recipe can set.

    The runner gives its first `num_given` positional parameters, and those named in `given`.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return Signature({}, True, {})
    hints = _hints(factory)
    if _has_unknown_decorator(factory):
        parameters, hints = _decorated_parameters(factory, parameters), {}
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    own = {p.name: p for p in parameters[num_given:] if p.kind in named and p.name not in given}
    is_open = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    return Signature(own, is_open, hints)


def _has_unknown_decorator(factory: Factory) -> bool:
    """Return whether a decorator of the user's stands before a factory: it may take others."""
    function: Any = _function(factory)
    while hasattr(function, "__wrapped__") and not hasattr(function, "__signature__"):
        home = str(getattr(function, "__globals__", {}).get("__name__", "functools"))
        if home.partition(".")[0] not in KEEP_SIGNATURE:
            return True
        function = function.__wrapped__
    return False


def _decorated_parameters(factory: Factory, wrapped: list[Parameter]) -> list[Parameter]:
    """Return the parameters of a decorator, with those of its function if it takes ``**kwargs``.

    It may give some of those itself: none is required.
    """
    own = list(inspect.signature(factory, follow_wrapped=False).parameters.values())
    if isinstance(factory, type):  # the signature of a class always follows
        own = list(inspect.signature(_function(factory), follow_wrapped=False).parameters.values())
    if not any(p.kind is Parameter.VAR_KEYWORD for p in own):
        return own
    named = [p for p in wrapped if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    known = {p.name for p in named}
    return [
        *(p if p.default is not p.empty else p.replace(default=None) for p in named),
        *(p for p in own if p.name not in known and p.kind is not Parameter.VAR_POSITIONAL),
    ]


def _function(factory: object) -> Any:
    if isinstance(factory, functools.partial):
        return _function(factory.func)
    if isinstance(factory, type):
        return getattr(factory, "__init__", factory)
    return factory if hasattr(factory, "__qualname__") else type(factory).__call__


def _hints(factory: Factory) -> Mapping[str, object]:
    try:
        return typing.get_type_hints(_function(factory))
    except (NameError, TypeError, AttributeError, SyntaxError):  # for type checkers only
        return {}


def check(
    signature: Signature, arguments: Mapping[str, object], key: str, factory: str
) -> list[Problem]:
    """Return the problems of `arguments`; they name the node `key` and the factory."""
    return [
        *_unknown(signature, arguments, key, factory),
        *_missing(signature, arguments, key, factory),
        *_mistyped(signature, arguments, key),
    ]


def _unknown(
    signature: Signature, arguments: Mapping[str, object], key: str, factory: str
) -> Iterator[Problem]:
    for name, value in arguments.items():
        if name in signature.parameters or (signature.open and not name.startswith("_")):
            continue
        remedy = nearest(name, signature.parameters)
        if not signature.parameters:
            remedy = "It takes no arguments."
        yield Problem(f"{key}.{name}={value!r}", f"{factory} has no such argument", remedy)


def _missing(
    signature: Signature, arguments: Mapping[str, object], key: str, factory: str
) -> Iterator[Problem]:
    for name, parameter in signature.parameters.items():
        if parameter.default is Parameter.empty and name not in arguments:
            yield Problem(f"{key}.{name}", f"{factory} needs it", f"Give {key}.{name}=…")


def _mistyped(signature: Signature, arguments: Mapping[str, object], key: str) -> Iterator[Problem]:
    for name, value in arguments.items():
        hint = signature.hints.get(name)
        if name not in signature.parameters or hint is None:
            continue
        default = signature.parameters[name].default
        as_default = type(value) is type(default) and value == default  # such as `size: int = None`
        if not as_default and not fits(value, hint):
            wanted = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
            remedy = f"Correct {key}.{name}."
            if isinstance(value, str) and fits(_as_yaml(value), hint):
                remedy = (
                    "Write it without quotes; from the environment it comes as a number by "
                    '"${oc.decode:${oc.env:NAME}}", with these quotes inside those of a shell.'
                )
            yield Problem(
                f"{key}.{name}={value!r}",
                f"it is of type {wanted}, not {type(value).__name__}",
                remedy,
            )


def _as_yaml(text: str) -> object:
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    try:
        found = safe_load(text)
        return float(text) if isinstance(found, str) else found  # YAML 1.1 takes 1e-3 for a text
    except (YAMLError, ValueError):
        return text


def fits(value: object, hint: object) -> bool:
    """Return whether a value of YAML may be of a type; types that YAML does not have always fit."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in SEQUENCES:
        return _fits_sequence(value, hint)
    if hint is type(None):
        return value is None
    if hint not in SCALARS or isinstance(value, Mapping):
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _fits_sequence(value: object, hint: object) -> bool:
    if isinstance(value, Mapping):  # nodes with a `_target_` become anything
        return True
    if not isinstance(value, (list, tuple)):
        return False
    kinds = typing.get_args(hint)
    if getattr(hint, "__args__", None) is None:  # `typing.List` by itself: any elements
        return True
    if typing.get_origin(hint) is tuple and Ellipsis not in kinds:
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    return all(fits(element, kinds[0]) for element in value)
