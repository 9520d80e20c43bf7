"""The interface of a number format; the default computes in the format of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel.config.handlers import AutocastKwargs


# What matrix products compute in, by the value of `mixed_precision`.
# fp8 is that of converted layers alone; all else computes in bf16.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Precision:
    """Full precision.

    Attributes:
        name: of the format.
        dtype: of matrix products under autocast; None: no autocast.
        handler: how the forward pass is cast.
    """

    name = "no"
    dtype: torch.dtype | None = None
    handler: AutocastKwargs

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return the context of a forward pass; `handler` takes the place of the run's own."""
        return contextlib.nullcontext()

    def convert(
        self,
        model: torch.nn.Module,
        evaluation: bool = False,
        gathers: bool = False,
        keep: Collection[torch.nn.Module] = (),
    ) -> None:
        """Replace layers of `model` by those of the format, in place; parameters keep their names.

        Args:
            model: before it is distributed and compiled; it may be on the meta device.
            evaluation: whether it is only evaluated.
            gathers: whether the strategy all-gathers weights, which it may do in the format.
            keep: modules inside whose layers stay.

        Raises:
            ConfigError: if no layer can be converted.
        """

    def wrap_forward(self, model: torch.nn.Module, outputs_in_fp32: bool = True) -> None:
        """Make `model.forward` compute under autocast and return fp32, if the format wants it."""

    def scales(self, model: torch.nn.Module) -> dict[str, dict[str, object]]:
        """Return what layers of a model keep between steps besides weights, as plain values."""
        return {}

    def load_scales(self, model: torch.nn.Module, scales: dict[str, dict[str, object]]) -> None:
        """Give a model what `scales` returned; formats that keep nothing ignore it."""
