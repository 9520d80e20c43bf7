"""What the user's methods must return, checked where a step or an evaluation calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel.errors import ConfigError, Problem


def shown(value: Any) -> str:
    """Return what a value is, in a few words: "None", "a list", "the class Linear"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _refused(owner: object, method: str, value: str, rule: str, remedy: str) -> ConfigError:
    name = f"{type(owner).__name__}.{method}"
    return ConfigError(Problem(f"{name} returned {value}", rule, remedy))


def losses(objective: object, value: Any) -> torch.Tensor:
    """Return the losses of an objective, each of one sample: [B].

    Raises:
        ConfigError: if they are no tensor [B], or carry no gradient where there is to be one.
    """
    if not isinstance(value, torch.Tensor):
        rule = "a tensor with the loss of each sample is required, [B]"
        raise _refused(objective, "losses", shown(value), rule, 'Use reduction="none".')
    if value.dim() != 1:
        raise _refused(
            objective,
            "losses",
            f"shape {list(value.shape)}",
            "it returns one value per sample, [B], so that padded samples can be left out",
            'Use reduction="none" and sum over everything but the first dim.',
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        rule = "a loss must depend on trainable parameters"
        remedy = "Compute it from the model's output, without detach(), item() and no_grad()."
        raise _refused(objective, "losses", "a tensor without gradient", rule, remedy)
    return value


def weights(objective: object, value: Any) -> torch.Tensor | None:
    """Return the weights of an objective's samples: [B], or None for one each.

    Raises:
        ConfigError: if they are neither.
    """
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 1):
        return value
    found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    rule = "a tensor with the weight of each sample is required, [B], or None for one each"
    raise _refused(objective, "weights", found, rule, "Count the items of each sample.")


def tensors(owner: object, method: str, value: Any) -> dict[str, torch.Tensor]:
    """Return values by name, each a tensor.

    Args:
        owner: the step or objective that was called.
        method: of it.
        value: what it returned.

    Raises:
        ConfigError: if they are none.
    """
    rule = "it returns tensors by name"
    if not isinstance(value, Mapping):
        raise _refused(owner, method, shown(value), rule, 'Return {"loss": …}.')
    for name, found in value.items():
        if not isinstance(found, torch.Tensor):
            what = f"{shown(found)} for {name!r}"
            raise _refused(owner, method, what, rule, "Return a tensor for each name.")
    return dict(value)


def metrics(owner: object, value: Any) -> dict[str, float]:
    """Return what `summarize` returned as numbers by name.

    Raises:
        ConfigError: if it is something else.
    """
    rule = "it returns the metrics of the data set, numbers by name"
    remedy = 'Return {"loss": 0.5, …}.'
    if not isinstance(value, Mapping):
        raise _refused(owner, "summarize", shown(value), rule, remedy)
    found: dict[str, float] = {}
    for name, metric in value.items():
        if isinstance(metric, torch.Tensor) and metric.numel() != 1:
            what = f"a tensor of shape {list(metric.shape)} for {name!r}"
            raise _refused(owner, "summarize", what, rule, "Return its mean, or the like.")
        try:
            found[str(name)] = float(metric)
        except (TypeError, ValueError):
            what = f"{shown(metric)} for {name!r}"
            raise _refused(owner, "summarize", what, rule, remedy) from None
    return found
