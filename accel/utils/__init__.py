"""Functions and classes of the documented `utils`: re-exports of the working modules."""

from __future__ import annotations

import sys

from accel import _lazy

sys.modules[__name__].__class__ = _lazy.Package


def __getattr__(name: str) -> object:
    return _lazy.attribute(__name__, name)


def __dir__() -> list[str]:
    return _lazy.names(__name__)
