"""A declarative training runner. Importing it imports no torch: names are looked up when used.

Nor does it import `accel`: the command first reorders `sys.path` (`runner.config.paths`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel.loss_normalization import global_weight as global_weight
    from accel.loss_normalization import normalize_loss as normalize_loss
    from runner.data.datasets import Data as Data
    from runner.data.micro_batch import MicroBatch as MicroBatch
    from runner.data.micro_batch import Window as Window
    from runner.factories.registry import register as register
    from runner.inference.load import load as load
    from runner.training.callback import Callback as Callback
    from runner.training.gradients import clip_gradients as clip_gradients
    from runner.training.gradients import keep_valid as keep_valid
    from runner.training.gradients import optimizer_step as optimizer_step
    from runner.training.objective import Objective as Objective
    from runner.training.step import Step as Step
    from runner.training.step import SupervisedStep as SupervisedStep

__all__ = [
    "Callback",
    "Data",
    "MicroBatch",
    "Objective",
    "Step",
    "SupervisedStep",
    "Window",
    "clip_gradients",
    "global_weight",
    "keep_valid",
    "load",
    "normalize_loss",
    "optimizer_step",
    "register",
]

# No module may be called like a name of this list: importing it would put it in the name's place.
_PLACES = {
    "Callback": "runner.training.callback",
    "Data": "runner.data.datasets",
    "MicroBatch": "runner.data.micro_batch",
    "Objective": "runner.training.objective",
    "Step": "runner.training.step",
    "SupervisedStep": "runner.training.step",
    "Window": "runner.data.micro_batch",
    "clip_gradients": "runner.training.gradients",
    "global_weight": "accel.loss_normalization",
    "keep_valid": "runner.training.gradients",
    "load": "runner.inference.load",
    "normalize_loss": "accel.loss_normalization",
    "optimizer_step": "runner.training.gradients",
    "register": "runner.factories.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
