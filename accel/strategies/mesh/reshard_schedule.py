"""When parameters are all-gathered and resharded, where FSDP2's own schedule does not suffice.

FSDP2 keeps some parameters gathered after a forward pass, for the backward pass that is to follow.
Where none follows, they would hide every later change of the shards: an optimizer step, weights
that are swapped for an evaluation. So a model is resharded after a pass without gradients, and
before an optimizer steps.

FSDP2 gathers the parameters of the root in the forward pass of the model. A module inside that is
called by itself (``model.encoder(tokens)``, as `generate` of an encoder-decoder does, or the model
inside of an adapter's) would find shards there, next to plain inputs.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from accel.strategies.mesh.torch_internals import (
    Models,
    make_root,
    reduce_gradients_after,
    unsharded_and_sharded,
)

T = TypeVar("T")


def fsdp_units(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP units of `model`, itself included."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: torch.nn.Module) -> None:
    """Free the gathered parameters of `model`; shards take their places."""
    for unit in fsdp_units(model):
        unit.reshard()


def reshard_after_evaluation(model: torch.nn.Module) -> None:
    """Let forward passes of `model` without gradients end by resharding."""

    def after(module: torch.nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled():
            reshard(module)

    model.register_forward_hook(after)


def train_after_inference(model: torch.nn.Module) -> None:
    """Let `model` be trained though its first forward pass is one in `torch.inference_mode`."""

    def before(module: torch.nn.Module, *_: object) -> None:
        allocate_outside_inference(module)

    model.register_forward_pre_hook(before, prepend=True)


def allocate_outside_inference(model: torch.nn.Module) -> None:
    """Allocate the gathered parameters of `model`, if its first pass is in inference mode.

    FSDP2 allocates them once, in the first pass; tensors of inference mode could never be trained.
    So they are allocated outside of it, a unit at a time.
    """
    if not torch.is_inference_mode_enabled() or any(True for _ in unsharded_and_sharded([model])):
        return
    with torch.inference_mode(False):
        for unit in fsdp_units(model):
            unit.unshard()
            unit.reshard()


def reshard_before_steps(optimizer: torch.optim.Optimizer, models: Models) -> None:
    """Let each step of `optimizer` find shards, also after a forward pass without a backward."""

    def before(*_: object) -> None:
        for model in models:
            reshard(model)

    optimizer.register_step_pre_hook(before)


class SubmoduleCalls:
    """Gathers the parameters of a model's root while a module inside is called by itself.

    They are resharded afterwards; with gradients, after the backward pass, or before the next
    optimizer step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._depth = 0  # nested calls of the model and of its modules
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        for module in _modules_of_root(model):
            module.register_forward_pre_hook(self._enter_module, prepend=True)
            module.register_forward_hook(self._leave_module, always_call=True)

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _enter_module(self, *_: object) -> None:
        model = None if self._depth else self._model()
        if isinstance(model, FSDPModule):
            make_root(model)
            allocate_outside_inference(model)
            model.unshard()
        self._depth += 1

    def _leave_module(self, module: torch.nn.Module, inputs: object, outputs: T) -> T:
        self._depth -= 1
        model = None if self._depth else self._model()
        if not isinstance(model, FSDPModule):
            return outputs
        if torch.is_grad_enabled():
            return reduce_gradients_after(model, outputs)
        reshard(model)
        return outputs


def _modules_of_root(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in `model` that are no units, nor inside of one."""
    for child in model.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _modules_of_root(child)
