"""The interface of a number format; the default computes in the format of the weights."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel.config.handlers import AutocastKwargs


# What matrix products compute in, by the value of `mixed_precision`.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Full precision. `dtype` is that of matrix products under autocast; None: no autocast."""

    name = "no"
    dtype: torch.dtype | None = None

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return the context of a forward pass; `handler` takes the place of the run's own."""
        return contextlib.nullcontext()

    def wrap_forward(self, model: torch.nn.Module, outputs_in_fp32: bool = True) -> None:
        """Make `model.forward` compute under autocast and return fp32, if the format wants it."""
