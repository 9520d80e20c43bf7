"""Methods of a facade that are those of an object it owns."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def delegate(
    owner: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls `method` on attribute `owner`; signature and docstring are its."""
    # Of the object's class: it may itself hold a method of the facade, see `connect`.
    found = operator.attrgetter(owner, f"{owner}.__class__.{method.__name__}")

    @functools.wraps(method)
    def call(self: object, /, *args: P.args, **kwargs: P.kwargs) -> R:
        owned, own = found(self)
        try:
            answer: R = own(owned, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            # Wrong arguments: Python names the owner's method, which its caller does not know.
            name = f"{type(self).__name__}.{method.__name__}"
            raise TypeError(str(error).replace(own.__qualname__, name)) from None
        return answer

    vars(call)["owner"] = owner
    return call


def connect(facade: object, base: type, per_step: Collection[str] = ()) -> None:
    """Connect a facade with the objects that it owns.

    They call each other's methods by `self`, as if they were methods of one object: where the
    facade's class overrides some of `base`, they call those.

    Args:
        facade: whose objects these are.
        base: the class that delegates.
        per_step: methods of which `facade` holds the owner's own, since calls of them count.
    """
    for name, inherited in vars(base).items():
        owner = getattr(inherited, "owner", None)
        if owner is None:
            continue
        if getattr(type(facade), name) is not inherited:
            setattr(getattr(facade, owner), name, getattr(facade, name))
        elif name in per_step:
            setattr(facade, name, getattr(getattr(facade, owner), name))
