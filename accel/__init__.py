"""A training engine: one loop for any device and any number of processes.

Importing this package imports neither torch nor an optional package; using a name does.
"""

from __future__ import annotations

from accel import _lazy

# Release of the documented API that this package offers: libraries choose their calls by it.
__version__ = "1.15.0"


def __getattr__(name: str) -> object:
    return _lazy.attribute(__name__, name)


def __dir__() -> list[str]:
    return _lazy.names(__name__)
