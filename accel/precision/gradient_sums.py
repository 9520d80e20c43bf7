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

_BF16 = torch.bfloat16


@final
class Fp32Sum:
    """The gradient of a parameter over a window, in fp32, from its second backward pass on.

    A gradient that autograd is about to add to ``.grad`` is added to the sum; then ``.grad`` is
    zero, and what autograd adds is the sum, rounded. So ``.grad`` stays the same tensor, as a view
    of DDP's bucket, and all hooks of a parameter find what they find without the sum. Where
    ``.grad`` is not what the sum rounds to, somebody has written to it, as clipping does: there,
    what is in ``.grad`` counts.

    Two kinds of passes are left to autograd, which adds in bf16, and the sum goes on after them:
    those that make a graph of gradients (``create_graph=True``), and the first one with another
    hook of the node after this one, which may change the gradient, or fail while ``.grad`` is zero.

    Attributes:
        parameter: [...] in bf16. No weak reference: torch swaps no tensor that has one.
    """

    def __init__(self, parameter: torch.Tensor, node: Node) -> None:
        self.parameter = parameter
        self._sum: torch.Tensor | None = None  # [...] in fp32
        self._shown: torch.Tensor | None = None  # [...] in `.grad`; None: the sum, rounded
        self._handle = node.register_prehook(self._add)

    def release(self) -> None:
        """Free the memory of the sum; ``.grad`` stays."""
        self._sum = self._shown = None

    def remove(self) -> None:
        """Sum no longer."""
        self._handle.remove()
        self.release()

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Return what autograd adds to ``.grad``; None: the gradient itself."""
        former, (gradient,) = self.parameter.grad, gradients
        if gradient is None:
            return None
        is_left = torch.is_grad_enabled() or self._is_followed()
        if former is None or not (_is_summable(former) and _is_summable(gradient)):
            self.release()
            return None
        if is_left:
            former, gradient = former.detach(), gradient.detach()
        held = self._sum
        if held is None:
            held = former.float()
        else:
            shown = held.bfloat16() if self._shown is None else self._shown
            held = torch.where(shown == former, held, former)
        self._sum = held.add_(gradient)
        if is_left:
            self._shown = former + gradient
            return None
        self._shown = None
        rounded = held.bfloat16()
        former.zero_()
        return (rounded,)

    def _is_followed(self) -> bool:
        """Return whether another hook comes after this one, which is the last from now on."""
        hooks, own = self._handle.hooks_dict_ref() or {}, self._handle.id
        for number in reversed(hooks):
            if number == own:
                break
            if not isinstance(getattr(hooks[number], "__self__", None), Fp32Sum):
                hooks[own] = hooks.pop(own)
                return True
        return False


@final
class OptimizerSums:
    """The sums of the weights of one optimizer, by the node of autograd that adds to ``.grad``.

    Attributes:
        sums: those of its weights in bf16 that have been trainable within the window, or before.
        is_open: whether a window is open: from its first micro-batch to the step.
    """

    def __init__(self) -> None:
        self.sums: dict[Node, Fp32Sum] = {}
        self.is_open = False
        self._seen: dict[int, torch.Tensor] = {}  # by id: looked at since the window was opened
        self._sample: tuple[torch.Tensor, Node] | None = None

    def open(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at all weights again: torch gives those that it converts other nodes."""
        former, self.sums = self.sums, {}
        self.is_open, self._seen, self._sample = True, {}, None
        for parameter in self._unseen(optimizer):
            self._follow(parameter, former)
        if former:
            frozen = {
                id(p)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.dtype is _BF16 and not p.requires_grad
            }
            for node, held in former.items():
                if id(held.parameter) in frozen:
                    self.sums[node] = held
                else:
                    held.remove()

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at weights that were added, unfrozen or converted since the window was opened.

        A model that was converted and back shows by the node of one of its weights.
        """
        if self._sample is not None:
            parameter, node = self._sample
            if parameter.requires_grad and _node(parameter) is not node:
                self.open(optimizer)
                return
        for parameter in self._unseen(optimizer):
            self._follow(parameter, {})

    def close(self) -> None:
        """Free the memory of the sums: the optimizer steps."""
        self.is_open = False
        for held in self.sums.values():
            held.release()

    def remove(self) -> None:
        """Sum no longer: the optimizer is gone."""
        for held in self.sums.values():
            held.remove()

    def _unseen(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen = self._seen
        return [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.dtype is _BF16 and id(p) not in seen and p.requires_grad
        ]

    def _follow(self, parameter: torch.Tensor, former: dict[Node, Fp32Sum]) -> None:
        self._seen[id(parameter)] = parameter  # which keeps its id
        if not parameter.is_leaf or hasattr(parameter, "device_mesh"):  # of a DTensor
            return
        node = _node(parameter)
        held = former.pop(node, None) or self.sums.get(node)
        self.sums[node] = held or Fp32Sum(parameter, node)
        if self._sample is None:
            self._sample = parameter, node


# An optimizer has its parameters, and so have the nodes and sums: all are freed with it.
_OPTIMIZERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerSums] = (
    weakref.WeakKeyDictionary()
)


def sum_in_fp32(optimizers: Iterable[torch.optim.Optimizer], is_new: bool) -> None:
    """Have the gradients of all trainable bf16 weights of `optimizers` summed in fp32.

    From the next backward pass on. A step frees the sums. Sharded weights (DTensor) are left to
    their strategy: FSDP2 reduces gradients, and sums them, in its own dtype.

    Args:
        optimizers: those that `prepare` was given.
        is_new: whether a window begins; else it goes on, or begins after a step of the optimizer.
    """
    for optimizer in optimizers:
        sums = _OPTIMIZERS.get(optimizer)
        if sums is None:
            sums = _OPTIMIZERS[optimizer] = OptimizerSums()
            # DDP's reducer keeps the nodes, and with them the sums, of a model that stays.
            weakref.finalize(optimizer, sums.remove).atexit = False
            # A wrapper that does not call Optimizer.__init__ has no hooks: it keeps its memory.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(_close)
        if is_new or not sums.is_open:
            sums.open(optimizer)
        else:
            sums.extend(optimizer)


def sum_unfrozen_in_fp32(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have weights take part that were added or unfrozen within the windows that are open.

    Args:
        optimizers: those that `prepare` was given.
    """
    for optimizer in optimizers:
        sums = _OPTIMIZERS.get(optimizer)
        if sums is not None and sums.is_open:
            sums.extend(optimizer)


def _close(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer in _OPTIMIZERS:
        _OPTIMIZERS[optimizer].close()


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
    norm_type = float(norm_type)  # torch takes "inf", too
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


def _is_summable(gradient: torch.Tensor) -> bool:
    return gradient.dtype is _BF16 and gradient.layout is torch.strided


def _node(parameter: torch.Tensor) -> Node:
    """Return what adds to the gradient of a parameter: another one after a change of its dtype."""
    return get_gradient_edge(parameter).node
