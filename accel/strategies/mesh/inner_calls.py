"""Modules inside of a sharded model that are called by themselves, not through the model.

FSDP2 gathers the parameters of the outermost unit in the forward pass of the model. What calls an
inner module instead (``model.encoder(tokens)``, as `generate` of an encoder-decoder does, or the
model inside of an adapter's) would find shards there, next to plain inputs.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from accel.strategies.mesh.resharding import gather_outside_inference, reshard
from accel.strategies.mesh.teardown import initialize, reduce_after


class InnerCalls:
    """Gathers what the outermost unit of a model holds while a module inside of it is called.

    Without gradients, everything is resharded afterwards; with them, when they are computed, or
    before the next optimizer step.

    Args:
        model: sharded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._depth = 0  # calls of the model and of its modules, one inside of another
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        for module in _of_outermost_unit(model):
            module.register_forward_pre_hook(self._enter_module, prepend=True)
            module.register_forward_hook(self._leave_module, always_call=True)

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _enter_module(self, module: torch.nn.Module, *_: Any) -> None:
        model: Any = None if self._depth else self._model()
        if model is not None:
            initialize(model)
            gather_outside_inference(model)
            model.unshard()
        self._depth += 1

    def _leave_module(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        self._depth -= 1
        model = None if self._depth else self._model()
        if model is None:
            return outputs
        if torch.is_grad_enabled():
            return reduce_after(model, outputs)
        reshard(model)
        return outputs


def _of_outermost_unit(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in `model` that are no units, nor inside of one."""
    for child in model.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _of_outermost_unit(child)
