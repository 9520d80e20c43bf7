"""Methods of a facade that are those of an object it owns."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def delegate(
    owner: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls `method` on attribute `owner`; signature and docstring are its."""
    # Of the object's class: it may itself hold a method of the facade, see `hand_overridden`.
    found = operator.attrgetter(owner, f"{owner}.__class__.{method.__name__}")

    @functools.wraps(method)
    def call(self: object, /, *args: P.args, **kwargs: P.kwargs) -> R:
        owned, own = found(self)
        answer: R = own(owned, *args, **kwargs)
        return answer

    vars(call)["owner"] = owner
    return call


def hand_overridden(facade: object, base: type) -> None:
    """Let the objects that `facade` owns call its methods where its class overrides some of `base`.

    They call each other's by `self`, as if they were methods of one object.
    """
    for name, inherited in vars(base).items():
        owner = getattr(inherited, "owner", None)
        if owner is not None and getattr(type(facade), name) is not inherited:
            setattr(getattr(facade, owner), name, getattr(facade, name))
