"""The mapping that hooks read offloaded weights from, and changed values are written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel.machine.errors import StateError
from accel.weights.offload_folder import OffloadedWeightsLoader, PrefixedDataset

Weights = Mapping[str, torch.Tensor]


def in_memory(weights: Weights | None, name: str) -> bool:
    """Return whether an offloaded weight lies in memory, not in a file."""
    if isinstance(weights, PrefixedDataset):
        return in_memory(weights.dataset, f"{weights.prefix}{name}")
    if isinstance(weights, OffloadedWeightsLoader):
        return weights.in_memory(name)
    return isinstance(weights, dict)


def write_weight(weights: Weights | None, name: str, value: torch.Tensor, tied: bool) -> None:
    """Have a weights map give another value of a weight, which is kept in memory.

    Files of weights stay as they are. A value of the same shape and dtype is copied to where the
    present one lies in memory.

    Args:
        weights: gets the value.
        name: of the weight.
        value: on any device.
        tied: whether the mapping has the weight under other names, too.

    Raises:
        StateError: if the mapping cannot be written to, or would have two values of one weight.
    """
    if tied:
        raise StateError(
            f"offloaded weight {name!r} is tied to others and was changed: it is kept by each of "
            "its names, which would differ. Keep its module on a device, or change it before "
            "dispatch_model."
        )
    # A tensor that is made in inference mode cannot be used for gradients later.
    with torch.inference_mode(False), torch.no_grad():
        content = value.detach().to("cpu")
        if in_memory(weights, name):
            assert weights is not None
            present = weights[name]
            fits = present.dtype == content.dtype and present.shape == content.shape
            if fits and not present.is_inference():
                present.copy_(content)
                return
        _set(weights, name, content.clone() if content.data_ptr() == value.data_ptr() else content)


def _set(weights: Any, name: str, value: torch.Tensor) -> None:
    if isinstance(weights, PrefixedDataset):
        _set(weights.dataset, f"{weights.prefix}{name}", value)
    elif isinstance(weights, (dict, OffloadedWeightsLoader)):
        weights[name] = value
    else:
        raise StateError(
            f"offloaded weight {name!r} was changed, and {type(weights).__name__}, which it is "
            "read from, keeps no other value. Pass a dict or an OffloadedWeightsLoader as "
            "weights_map, or offload_buffers=False."
        )
