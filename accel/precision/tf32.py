"""TF32: fp32 matrix products and convolutions with 10 bits of mantissa, on GPUs that have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tf32(enabled: bool | None) -> Iterator[None]:
    """Let fp32 matrix products and convolutions on GPUs use TF32 within the context, or not.

    Inputs are rounded to 10 bits of mantissa, sums are in fp32. Elsewhere it changes nothing.

    Args:
        enabled: whether they do; None: as torch has it (products in fp32, convolutions in TF32).

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
        (TensorFloat-32 on Ampere and later devices)
    """
    if enabled is None:
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
