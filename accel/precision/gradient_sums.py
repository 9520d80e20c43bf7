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
from torch.autograd.graph import Node, get_gradient_edge

from accel.precision.amp import parameters_of

# The nodes of autograd that add to the ``.grad`` of an optimizer's parameters, with their sums. An
# optimizer has its parameters, and so have the nodes: both are freed with it.
_HOOKED: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Node, Fp32Sum]] = (
    weakref.WeakKeyDictionary()
)


@final
class Fp32Sum:
    """The gradient of a parameter over a window, in fp32, from its second backward pass on.

    A gradient that autograd is about to add to ``.grad`` is added to the sum; then ``.grad`` is
    zero, and what autograd adds is the sum, rounded. So ``.grad`` stays the same tensor, as a view
    of DDP's bucket, and all hooks of a parameter find what they find without the sum. Where
    ``.grad`` is not what the sum rounds to, somebody has written to it, as clipping does: there,
    what is in ``.grad`` counts.
    """

    def __init__(self, parameter: torch.Tensor, node: Node) -> None:
        self._parameter = weakref.ref(parameter)
        self._sum: torch.Tensor | None = None  # [...] in fp32
        self.handle = node.register_prehook(self._add)

    def release(self) -> None:
        """Free the memory of the sum; ``.grad`` stays."""
        self._sum = None

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Return what autograd adds to ``.grad``; None: the gradient itself."""
        parameter, (gradient,) = self._parameter(), gradients
        if gradient is None:
            return None
        former = None if parameter is None else parameter.grad
        if former is None or not _is_summed(former, gradient):
            self.release()
            return None
        held = self._sum
        if held is None:
            held = former.float()
        else:
            held = torch.where(held.bfloat16() == former, held, former)
        self._sum = held.add_(gradient)
        rounded = held.bfloat16()
        former.zero_()
        return (rounded,)


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
        nodes = {_node(p): p for p in parameters_of(optimizer) if _is_summable(p)}
        known = _HOOKED.get(optimizer, {})
        for node in known.keys() - nodes.keys():  # of weights that are frozen, removed, converted
            known[node].handle.remove()
        if nodes and optimizer not in _HOOKED:
            optimizer.register_step_pre_hook(_release)
        if nodes or known:
            sums = {node: known.get(node) or Fp32Sum(p, node) for node, p in nodes.items()}
            _HOOKED[optimizer] = sums


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


def _is_summable(parameter: torch.Tensor) -> bool:
    return (
        parameter.dtype == torch.bfloat16
        and parameter.requires_grad
        and parameter.is_leaf
        and not hasattr(parameter, "device_mesh")  # of a DTensor
    )


def _node(parameter: torch.Tensor) -> Node:
    """Return what adds to the gradient of a parameter: another one after a change of its dtype."""
    return get_gradient_edge(parameter).node


def _release(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for held in _HOOKED.get(optimizer, {}).values():
        held.release()
