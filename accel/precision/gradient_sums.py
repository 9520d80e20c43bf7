"""Gradients of bf16 weights, summed in fp32 over a window of micro-batches.

The gradient of a weight has the dtype of that weight, and torch adds that of each backward pass in
it. A sum in bf16 has 8 bits of mantissa: once it is 256 times as large as what is added, it stays
as it is. So the sum is kept in fp32 beside ``parameter.grad``, which is that sum rounded once.

Source: https://docs.pytorch.org/docs/stable/notes/autograd.html
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.precision.amp import parameters_of

_SUMS = WeakIdKeyDictionary()  # parameter → its Fp32Sum
_RELEASED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@final
class Fp32Sum:
    """The gradient of a parameter over a window, in fp32, from its second backward pass on.

    What its rounding has left out is kept, in fp32, and added again with the next gradient: both
    are the sum, without an error. Before autograd adds a gradient to ``.grad``, that is put aside;
    after it has put the new one there, the former tensor is put back, with the new sum. So views of
    DDP's buckets stay, and what DDP reduces after its own hooks is the sum. After a write to
    ``.grad``, as of clipping, dropping or averaging it, it is taken as it is. Of a write by its
    ``data``, which torch does not count, it is off by no more than the rest.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._rest: torch.Tensor | None = None  # [...] in fp32: of the sum, that .grad has not
        self._rounded: tuple[weakref.ref[torch.Tensor], int] | None = None  # with its version
        self._former: torch.Tensor | None = None  # within a backward pass
        parameter.register_hook(self._put_aside)
        parameter.register_post_accumulate_grad_hook(self._add)

    def release(self) -> None:
        """Free the memory of the sum; ``.grad`` stays."""
        self._rest = self._rounded = self._former = None

    def _put_aside(self, gradient: torch.Tensor) -> None:
        parameter = self._parameter()
        former = None if parameter is None else parameter.grad
        if parameter is None or former is None or not _is_summed(former, gradient):
            self.release()
            return
        if not self._is_of(former):
            self._rest = None
        self._former, parameter.grad = former, None

    def _add(self, parameter: torch.Tensor) -> None:
        former, self._former = self._former, None
        if former is None:
            return
        if parameter.grad is not None:
            total = former.float() if self._rest is None else self._rest.add_(former)
            total.add_(parameter.grad)
            former.copy_(total)
            self._rest = total.sub_(former)
        parameter.grad = former
        self._rounded = weakref.ref(former), former._version

    def _is_of(self, gradient: torch.Tensor) -> bool:
        if self._rounded is None:
            return False
        rounded, version = self._rounded
        return rounded() is gradient and gradient._version == version


def _is_summed(former: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether both are dense and in bf16, and no gradients of gradients are computed."""
    return not torch.is_grad_enabled() and all(
        entry.dtype == torch.bfloat16 and entry.layout == torch.strided and not entry.requires_grad
        for entry in (former, gradient)
    )


def sum_in_fp32(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have the gradients of all trainable bf16 weights of `optimizers` summed in fp32.

    From the next backward pass on; also those of weights that were added or unfrozen since the
    latest call. A step frees the sums. Sharded weights (DTensor) are left to their strategy: FSDP2
    reduces gradients, and sums them, in its own dtype.

    Args:
        optimizers: those that `prepare` was given.
    """
    for optimizer in optimizers:
        new = [p for p in parameters_of(optimizer) if _is_new(p)]
        for parameter in new:
            _SUMS[parameter] = Fp32Sum(parameter)
        if new and optimizer not in _RELEASED:
            _RELEASED.add(optimizer)
            optimizer.register_step_pre_hook(_release)


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_`, by a norm that is computed in fp32.

    torch computes it in the dtype of the gradients: in bf16, with an error of up to 2**-9.

    Args:
        parameters: whose gradients, in bf16 or any other dtype.
        max_norm: largest norm.
        norm_type: order of the norm.

    Returns:
        [] the norm before, in fp32, or fp64 where a gradient is.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(hasattr(entry, "device_mesh") or entry.is_sparse for entry in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    in_bf16 = [entry for entry in gradients if entry.dtype == torch.bfloat16]
    others = [entry for entry in gradients if entry.dtype != torch.bfloat16]
    norms = [
        *(torch._foreach_norm(in_bf16, norm_type, dtype=torch.float32) if in_bf16 else ()),
        *(torch._foreach_norm(others, norm_type) if others else ()),
    ]
    total = torch.nn.utils.get_total_norm(norms, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _is_new(parameter: torch.Tensor) -> bool:
    return (
        parameter.dtype == torch.bfloat16
        and parameter.requires_grad
        and parameter.is_leaf
        and not hasattr(parameter, "device_mesh")  # of a DTensor
        and parameter not in _SUMS
    )


def _release(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in parameters_of(optimizer):
        held = _SUMS.get(parameter)
        if held is not None:
            held.release()
