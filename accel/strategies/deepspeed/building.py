"""Models that are cut into parts while they are built.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from accel.errors import ConfigError, Problem


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
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if writes and hasattr(target, "ds_id") and target.numel() < target.ds_numel:
            raise ConfigError(
                Problem(
                    f"{name} on a parameter of shape {tuple(target.ds_shape)} under ZeRO-3",
                    "its layer is built and cut into parts, so that the values would be lost",
                    "Initialise inside of `with deepspeed.zero.GatheredParameters(parameter, "
                    "modifier_rank=0):`, or leave zero3_init_flag out.",
                )
            )
        return func(*args, **(kwargs or {}))
