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
    """Return a method that calls that of the attribute `owner`; signature and docstring are its.

    Args:
        owner: name of the attribute.
        method: of the owner's class.
    """
    bound = operator.attrgetter(f"{owner}.{method.__name__}")

    @functools.wraps(method)
    def call(self: object, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = bound(self)(*args, **kwargs)
        return answer

    return call
