"""Gathered parameters: copies of shards, which see nothing of what becomes of these.

FSDP2 keeps some of them after a forward pass, for the backward pass that is to follow. Where none
follows, they would hide every later change of the shards: an optimizer step, weights that are
swapped for an evaluation. So copies are dropped where a pass computes no gradients, and before an
optimizer steps.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from accel.strategies.mesh.teardown import units_of
from accel.strategies.trainable import requires_grad

Models = Iterable[torch.nn.Module]


def reshard(model: torch.nn.Module) -> None:
    """Drop what is gathered of `model`; its parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard_after_evaluation(model: torch.nn.Module) -> None:
    """Let forward passes of `model` that compute no gradients leave shards behind."""

    def after(module: torch.nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            reshard(module)

    model.register_forward_hook(after)


def train_after_inference(model: torch.nn.Module) -> None:
    """Let `model` be trained though its first forward pass is one in `torch.inference_mode`."""

    def before(module: torch.nn.Module, *_: Any) -> None:
        gather_outside_inference(module)

    model.register_forward_pre_hook(before, prepend=True)


def gather_outside_inference(model: torch.nn.Module) -> None:
    """Make the tensors that units are gathered into, if that comes first in inference mode.

    FSDP2 makes them in the first pass, and keeps them; those of inference mode can never be trained
    with. So they are made outside of it, a unit at a time.
    """
    if not torch.is_inference_mode_enabled() or any(True for _ in copies_and_shards([model])):
        return
    with torch.inference_mode(False):
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                unit.reshard()


def reshard_before_steps(optimizer: torch.optim.Optimizer, models: Callable[[], Models]) -> None:
    """Let each step of `optimizer` find shards, also after a forward pass without a backward.

    Args:
        optimizer: of torch.
        models: returns those whose parameters it may hold.
    """

    def before(*_: Any) -> None:
        for model in models():
            reshard(model)

    optimizer.register_step_pre_hook(before)


def any_gathered(models: Models) -> bool:
    """Return whether parameters of `models` are copies at present."""
    return any(not unit.is_sharded for model in models for unit in units_of(model))


def copies_and_shards(models: Models) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield each parameter as it was ever gathered, and its shard (torch has no public names)."""
    for model in models:
        for unit in units_of(model):
            for parameter in unit.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):  # from its first pass on
                    yield parameter._unsharded_param, parameter.sharded_param


def unreduced_gradients(models: Models) -> Iterator[torch.Tensor]:
    """Yield the gradients that passes without synchronization left for a later one to reduce."""
    for model in models:
        for unit in units_of(model):
            if unit._partial_reduce_output is not None:
                yield unit._partial_reduce_output
            for parameter in unit.fsdp_params:
                copy = getattr(parameter, "_unsharded_param", None)
                held = (parameter.unsharded_accumulated_grad, getattr(copy, "grad", None))
                yield from (gradient for gradient in held if gradient is not None)


def keep_requires_grad(model: torch.nn.Module) -> None:
    """Let parameters that are frozen or unfrozen while they are gathered stay so as shards.

    FSDP2 gives the gathered copy what the shard says, and not the other way round; between the
    micro-batches of a window, `module.requires_grad_()` finds the copies.

    Args:
        model: sharded, before its first forward pass.
    """
    for unit in units_of(model):
        _keep_requires_grad(unit)


def _keep_requires_grad(unit: Any) -> None:
    gather, found = unit._to_unsharded, list[bool]()

    def to_unsharded() -> None:
        gathers = not unit.is_unsharded
        gather()
        if gathers:
            found[:] = map(requires_grad, [p._unsharded_param for p in unit.fsdp_params])

    def keeps(change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            if unit.is_unsharded and found:
                now = list(map(requires_grad, [p._unsharded_param for p in unit.fsdp_params]))
                for parameter, flag, before in zip(unit.fsdp_params, now, found, strict=True):
                    if flag is not before:
                        parameter.sharded_param.requires_grad_(flag)
                found.clear()
            change()

        return changed

    unit._to_unsharded, unit._to_sharded = to_unsharded, keeps(unit._to_sharded)
    unit._to_sharded_post_forward = keeps(unit._to_sharded_post_forward)
