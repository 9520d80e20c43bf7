"""A library in the place of the real one, which keeps the calls that it gets."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest


class Fake:
    """Any attribute is one, too; calling it is noted, and gives another.

    Args:
        path: how it was reached: "wandb.init()".
        calls: everything that was called, as (path, positional arguments, keyword arguments).
        answers: results of calls, by path.
    """

    def __init__(self, path: str, calls: list[Any], answers: dict[str, Any]) -> None:
        vars(self).update(path=path, calls=calls, answers=answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Fake(f"{self.path}.{name}", self.calls, self.answers)

    def __setattr__(self, name: str, value: object) -> None:
        self.calls.append((f"{self.path}.{name} =", (value,), {}))

    def __setitem__(self, name: str, value: object) -> None:
        self.calls.append((f"{self.path}[{name}] =", (value,), {}))

    def __contains__(self, item: object) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((self.path, args, kwargs))
        return self.answers.get(self.path, Fake(f"{self.path}()", self.calls, self.answers))

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def got(self, path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each call of `path`, below this library."""
        return [(args, kwargs) for found, args, kwargs in self.calls if found == path]


def library(
    monkeypatch: pytest.MonkeyPatch, name: str, submodules: Iterable[str] = (), **answers: Any
) -> Fake:
    """Put a fake in the place of a library and of its submodules, and return it."""
    fake = Fake(name, [], {path.replace("__", "."): found for path, found in answers.items()})
    monkeypatch.setitem(sys.modules, name, fake)  # type: ignore[misc]
    for module in submodules:
        found = Fake(f"{name}.{module}", fake.calls, fake.answers)
        monkeypatch.setitem(sys.modules, f"{name}.{module}", found)  # type: ignore[misc]
    return fake
