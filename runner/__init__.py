"""A declarative training runner. Importing it imports no torch: names are looked up when used.

Nor does it import `accel`: the command first reorders `sys.path` (`runner.recipe.paths`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    # Asked for before a submodule is imported (`from runner import cli`), too.
    if find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accel import _lazy

    return _lazy.attribute(__name__, name)


def __dir__() -> list[str]:
    from accel import _lazy

    return _lazy.names(__name__)
