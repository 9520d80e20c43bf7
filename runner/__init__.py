"""A declarative training runner. Importing it imports no torch: names are looked up when used.

Nor does it import `accel`: the command first reorders `sys.path` (`runner.recipe.paths`).
"""

from __future__ import annotations

import importlib
from typing import Any

# Public names and their modules. No module here has one of these names: importing it would replace
# the name. `__init__.pyi` says the same to type checkers.
_HOMES = {
    "global_weight": "accel.run.loss_normalization",
    "normalize_loss": "accel.run.loss_normalization",
    "Data": "runner.data.datasets",
    "MicroBatch": "runner.data.batches",
    "Window": "runner.data.batches",
    "load": "runner.inference.load",
    "register": "runner.recipe.factory",
    "Callback": "runner.training.run",
    "Objective": "runner.training.step",
    "clip_gradients": "runner.training.step",
    "keep_valid": "runner.training.step",
    "optimizer_step": "runner.training.step",
    "Step": "runner.training.step",
    "SupervisedStep": "runner.training.step",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
