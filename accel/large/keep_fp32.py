"""Modules that stay in fp32 within a model of 16 bits: they convert what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.tree import iterate, recursively_apply

_MARK = "_accel_computes_in_fp32"


class _Conversion:
    """Forward hooks of one module: inputs become fp32, and outputs what the inputs were."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of outputs where no input is floating (embeddings)
        self.given = dtype

    def before(self, _: nn.Module, args: object, kwargs: object) -> tuple[Any, Any]:
        floating = (t.dtype for t in iterate([args, kwargs]) if t.is_floating_point())
        self.given = next(floating, self.dtype)
        return _converted(args, torch.float32), _converted(kwargs, torch.float32)

    def after(self, _: nn.Module, __: object, output: object) -> object:
        return _converted(output, self.given)


def _converted(data: object, dtype: torch.dtype) -> Any:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return recursively_apply(convert, data)


def compute_in_fp32(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Have the modules of some weights compute in fp32, between others of 16 bits.

    Args:
        model: the model.
        names: full names of weights that stay in fp32.
        dtype: of the others; modules without floating inputs return it.
    """
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        if not hasattr(module, _MARK):
            conversion = _Conversion(dtype)
            module.register_forward_pre_hook(conversion.before, with_kwargs=True)
            module.register_forward_hook(conversion.after)
            setattr(module, _MARK, True)
