"""Dtypes of torch by name, as configurations and index files write them."""

from __future__ import annotations

import torch

from accel.machine.errors import ConfigError, nearest

_EXAMPLES = ("float32", "float16", "bfloat16", "float64")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype, also by its name with or without "torch."; raise `ConfigError` if unknown."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        rule = "it is a dtype of torch"
        raise ConfigError.of(f"dtype={dtype!r}", rule, nearest(dtype, _EXAMPLES))
    return found
