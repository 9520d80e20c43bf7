"""Optimizer state by parameter name, so that it fits any wrapper, order and world size.

A key is ``<model>:<name>``, e.g. ``model:fc.weight`` or ``model_1:fc.weight`` (models in the order
they were prepared). A parameter that is in no model is keyed by its position in the optimizer,
``#3``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accel.machine.errors import CheckpointError, Problem
from accel.precision.wrapping import plain_name

FORMAT_VERSION = 1
SCALARS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, in fp32 for any weight


class ParameterNames:
    """Parameter names of unwrapped models in the order of `prepare`; aliases of tied ones, too."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        from accel.checkpoint.directory import numbered

        self._owner: dict[str, int] = {}  # each name → identity of its parameter
        self._first: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = numbered("model", "", index)
            for name, parameter in model.named_parameters(remove_duplicate=False):
                key = f"{prefix}:{plain_name(name)}"
                self._owner[key] = id(parameter)
                self._first.setdefault(id(parameter), key)

    def keys(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the key of each parameter, by its position in the optimizer."""
        return [self.key(p, i) for i, p in enumerate(parameters(optimizer))]

    def key(self, parameter: torch.Tensor, position: int) -> str:
        """Return the key of a parameter that is number `position` of its optimizer."""
        return self._first.get(id(parameter), f"#{position}")

    def canonical(self, key: str) -> str:
        """Return the first name of the parameter called `key`, or `key` if there is none."""
        return self._first[self._owner[key]] if key in self._owner else key


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order by which `state_dict()` numbers them."""
    flat = (p for group in optimizer.param_groups for p in group["params"])
    return list({id(p): p for p in flat}.values())


def state_by_name(optimizer: torch.optim.Optimizer, names: ParameterNames) -> dict[str, Any]:
    """Return the optimizer's state dict with names in the place of positions.

    Returns:
        param_groups: as in torch, `params` holding keys.
        state: per key, as in torch.
        other_state: state that belongs to no parameter.
        unnamed: the keys of parameters that are in no saved model.
        extra: further entries of the optimizer's state dict.
    """
    saved = optimizer.state_dict()
    keys = names.keys(optimizer)
    state = saved["state"]
    positions = {k for k in state if isinstance(k, int)}
    return {
        "format": FORMAT_VERSION,
        "param_groups": [
            {**group, "params": [keys[i] for i in group["params"]]}
            for group in saved["param_groups"]
        ],
        "state": {keys[i]: state[i] for i in sorted(positions)},
        "other_state": {k: value for k, value in state.items() if k not in positions},
        "unnamed": [key for key in keys if key.startswith("#")],
        "extra": {k: v for k, v in saved.items() if k not in ("state", "param_groups")},
    }


def load_by_name(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: ParameterNames
) -> None:
    """Restore what `state_by_name` returned, bit for bit.

    Raise `CheckpointError` if the optimizer has other parameters or groups than the saved one.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT_VERSION:
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise misfit(f"format {found!r}", f"this version reads {FORMAT_VERSION}")
    keys = names.keys(optimizer)
    position = {key: index for index, key in enumerate(keys)}
    live = optimizer.state_dict()["param_groups"]
    groups = saved["param_groups"]
    if len(groups) != len(live):
        raise misfit(f"{len(live)} parameter groups", f"the saved one has {len(groups)}")
    state = {
        position[names.canonical(key)]: value
        for key, value in saved["state"].items()
        if names.canonical(key) in position
    }
    optimizer.load_state_dict(
        {
            **saved["extra"],
            "state": {**state, **saved["other_state"]},
            "param_groups": [
                _fitted(number, old, new, keys, names)
                for number, (old, new) in enumerate(zip(groups, live, strict=True))
            ],
        }
    )
    _undo_casts(optimizer, state)


def _fitted(
    number: int,
    saved: dict[str, Any],
    live: dict[str, Any],
    keys: list[str],
    names: ParameterNames,
) -> dict[str, Any]:
    """Return a saved group that lists the live optimizer's positions."""
    ours = {keys[i] for i in live["params"]}
    theirs = {names.canonical(key) for key in saved["params"]}
    if ours != theirs:
        lacking = _some(theirs - ours)
        new = _some(ours - theirs)
        raise misfit(
            f"group {number}", f"it lacks {lacking} of the saved group, and has {new} besides"
        )
    own = {"params": live["params"]}
    if "param_names" in live:
        own["param_names"] = live["param_names"]
    options = {k: _in_form_of(live.get(k), v) for k, v in saved.items() if k != "param_names"}
    return options | own


def _in_form_of(live: object, saved: object) -> object:
    """Return a number as a 0-d tensor where the optimizer keeps this option as one, or reverse.

    torchao's optimizers want a rate as a tensor, torch's without `capturable` want a number.
    """
    if isinstance(live, torch.Tensor) and isinstance(saved, int | float):
        return torch.full_like(live, saved)
    if isinstance(live, float) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return saved.item()
    return saved


def _undo_casts(optimizer: torch.optim.Optimizer, state: dict[int, object]) -> None:
    """Put back tensors that torch cast to their parameter's dtype while loading.

    Not the moments of torch's own optimizers, which compute in the dtype of the weight: those of a
    checkpoint whose weights had another dtype are cast.
    """
    flat = parameters(optimizer)
    own = _is_torchs(optimizer)
    for index, saved in state.items():
        live = optimizer.state.get(flat[index], {})
        for name, value in saved.items() if isinstance(saved, dict) else ():
            now = live.get(name)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if not both or now.dtype == value.dtype:
                continue
            if not (own and _has_dtype_of_weight(name, value, flat[index])):
                live[name] = value.to(now.device)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's code computes the step: that of the class, as instances are patched.

    Torch wraps the `step` of each class, a user's subclass without one, too; the wrapper keeps the
    name of the module.
    """
    kind = type(optimizer)
    modules = (kind.__module__, getattr(kind.step, "__module__", None) or "")
    return any(module.startswith("torch.optim.") for module in modules)


def _has_dtype_of_weight(name: str, value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch's optimizers keep this entry in the dtype of `weight`."""
    scalar = value.dim() == 0 and (weight.dim() > 0 or name in SCALARS)
    return value.is_floating_point() and not scalar


def _some(keys: Iterable[str]) -> str:
    ordered = sorted(keys)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return (", ".join(ordered[:3]) or "nothing") + more


def misfit(value: str, rule: str) -> CheckpointError:
    """Return the error that a saved optimizer state does not fit the optimizer."""
    remedy = "Build the optimizer as it was when it was saved, over the same models."
    return CheckpointError(Problem(f"optimizer: {value}", rule, remedy))
