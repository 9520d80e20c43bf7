"""torchao's fp8 linear layer as a run computes it; imported only where torchao is.

A class and not a wrapper around each layer: code that `torch.compile` made for one block then fits
all blocks of a model.

Source: https://docs.pytorch.org/ao/stable/api_reference/api_ref_float8.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torchao.float8 import float8_linear


class Float8Linear(float8_linear.Float8Linear):
    """A linear layer in fp8: under any device's autocast, and in inference mode."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out] of inputs [..., in], in the dtype of autocast."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):  # torchao's own casts for that of CUDA alone
            input = input.to(torch.get_autocast_dtype(kind))
        with layer_context(kind):
            outputs: torch.Tensor = super().forward(input)
        return outputs


def layer_context(device_type: str) -> AbstractContextManager[object]:
    """Return the context that a converted layer computes in: without autocast and inference mode.

    Autocast would cast matrices that are in fp8 already. In inference mode, torch hands torchao's
    tensors operations that they do not know (a reshape, a cast).
    """
    no_autocast = torch.autocast(device_type, enabled=False)
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return no_autocast
    return _without_inference_mode(no_autocast)


@contextlib.contextmanager
def _without_inference_mode(inner: AbstractContextManager[object]) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), inner:
        yield
