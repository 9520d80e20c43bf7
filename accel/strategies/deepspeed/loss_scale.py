"""The loss scale of fp16: out of an engine, and back.

Source: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "loss_scale"  # in the `extra` of an optimizer's state
_COUNTS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scale_state(engine: Any) -> dict[str, Any]:
    """Return the scale and its counts as `extra` of the optimizer's state; {} if it is constant.

    Args:
        engine: a `DeepSpeedEngine` that trains.
    """
    autocast, own = _of_autocast(engine), _own(engine)
    if autocast is not None:
        return {KEY: dict(autocast.state_dict())}
    if own is not None:
        return {KEY: {name: getattr(own, name) for name in _COUNTS if hasattr(own, name)}}
    return {}


def load_scale_state(engine: Any, extra: Mapping[str, Any]) -> None:
    """Load what `scale_state` returned; a run in another precision keeps what it has.

    Args:
        engine: a `DeepSpeedEngine` that trains.
        extra: of the saved optimizer's state.
    """
    saved, autocast, own = extra.get(KEY, {}), _of_autocast(engine), _own(engine)
    if autocast is not None and "_growth_tracker" in saved:
        autocast.load_state_dict(saved)
    elif own is not None and "cur_scale" in saved:
        for name in _COUNTS:
            if name in saved and hasattr(own, name):
                setattr(own, name, saved[name])


def _of_autocast(engine: Any) -> Any | None:
    """Return the `torch.amp.GradScaler` of an engine under `torch_autocast`, if it has one."""
    whole = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return whole or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _own(engine: Any) -> Any | None:
    """Return what holds DeepSpeed's own scale, if that changes in the course of a run."""
    optimizer = engine.optimizer
    if getattr(optimizer, "dynamic_loss_scale", False):  # stages 1 to 3
        return optimizer.loss_scaler
    config = getattr(optimizer, "loss_scale_config", None)
    return config if getattr(config, "dynamic_loss_scale", False) else None
