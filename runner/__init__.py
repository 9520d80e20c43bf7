"""A declarative training runner. Importing it imports no torch: names are looked up when used.

Nor does it import `accel`: the command first settles where that is looked for (`runner.paths`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.callbacks.base import Callback as Callback
    from runner.data import Data as Data
    from runner.micro_batch import MicroBatch as MicroBatch
    from runner.micro_batch import Window as Window
    from runner.objective import Objective as Objective
    from runner.registry import register as register
    from runner.restore import load as load
    from runner.step import Step as Step
    from runner.step import SupervisedStep as SupervisedStep

__all__ = [
    "Callback",
    "Data",
    "MicroBatch",
    "Objective",
    "Step",
    "SupervisedStep",
    "Window",
    "load",
    "register",
]

# No module may be called like a name of this list: importing it would put it in the name's place.
_PLACES = {
    "Callback": "runner.callbacks.base",
    "Data": "runner.data",
    "MicroBatch": "runner.micro_batch",
    "Objective": "runner.objective",
    "Step": "runner.step",
    "SupervisedStep": "runner.step",
    "Window": "runner.micro_batch",
    "load": "runner.restore",
    "register": "runner.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
