"""Modules that stay in fp32 within a model of 16 bits: they convert what they are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel.machine.tree import iterate, recursively_apply

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


def modules_in_fp32(
    names: Iterable[str], kept: Iterable[str], ties: Iterable[Sequence[str]]
) -> set[str]:
    """Return the modules that compute in fp32: of weights that stay in it, and what follows.

    A module that shares a weight with one follows, and all within: they get its inputs.

    Args:
        names: full names of all weights.
        kept: those that stay in fp32.
        ties: the names of each weight that has several.
    """
    every, found = set(map(module_of, names)), set(map(module_of, kept))
    sharing = [set(map(module_of, group)) for group in ties]
    known = -1
    while len(found) != known:  # each may bring modules of others
        known = len(found)
        found |= {name for name in every if any(name.startswith(f"{one}.") for one in found)}
        found = found.union(*(modules for modules in sharing if modules & found))
    return found


def module_of(name: str) -> str:
    """Return the module that holds a weight, by its full name; "" for the model."""
    return name.rpartition(".")[0]


def compute_in_fp32(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Have the modules of some weights compute in fp32, between others of 16 bits.

    Args:
        model: the model.
        names: full names of weights that stay in fp32.
        dtype: of the others; modules without floating inputs return it.
    """
    for path in dict.fromkeys(map(module_of, names)):
        module = model.get_submodule(path)
        if not hasattr(module, _MARK):
            conversion = _Conversion(dtype)
            module.register_forward_pre_hook(conversion.before, with_kwargs=True)
            module.register_forward_hook(conversion.after)
            setattr(module, _MARK, True)
