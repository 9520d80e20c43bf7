"""Models that are cut into parts while they are built.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accel.errors import ConfigError, Problem

# What returns another tensor over the memory of its first argument, so that writing gets there.
_SAME_MEMORY = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]


class RefusesLostValues(TorchFunctionMode):
    """Refuses to write to parameters that lie elsewhere already.

    DeepSpeed cuts the parameters of each layer at the end of its ``__init__``. What the model
    around it initialises afterwards finds empty tensors, and would be lost without a word.

    Raises:
        ConfigError: naming the operation and the shape of the parameter.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it writes to what is not here."""
        target: Any = args[0] if args else (kwargs or {}).get("tensor")  # `torch.nn.init` names it
        name = getattr(func, "__name__", "")
        shape = _cut_shape(target)
        if shape is not None and _writes(name):
            raise ConfigError(
                Problem(
                    f"{name} on a parameter of shape {shape} under ZeRO-3",
                    "its layer is built and cut into parts, so that the values would be lost",
                    "Initialise inside of `with deepspeed.zero.GatheredParameters(parameter, "
                    "modifier_rank=0):`, or leave zero3_init_flag out.",
                )
            )
        result = func(*args, **(kwargs or {}))
        if shape is not None and func in _SAME_MEMORY:
            result.accel_cut_shape = shape
        return result


def _cut_shape(tensor: Any) -> tuple[int, ...] | None:
    """Return the shape that a parameter, or what shares its memory, has in one piece.

    None: it is here as a whole, or no parameter.
    """
    if hasattr(tensor, "ds_id") and tensor.numel() < tensor.ds_numel:
        return tuple(tensor.ds_shape)
    return getattr(tensor, "accel_cut_shape", None)


def _writes(name: str) -> bool:
    """Return whether a function of torch called `name` changes its first argument."""
    plain = name.endswith("_") and not name.endswith("__")
    return (plain and name != "requires_grad_") or name == "__setitem__"
