"""Hooks around forward passes and steps, where FSDP2 and torch's optimizers do not suffice.

FSDP2 keeps some parameters gathered after a forward pass, for the backward pass that is to follow.
Where none follows, they would hide every later change of the shards: an optimizer step, weights
that are swapped for an evaluation. So a model is resharded after a pass without gradients, and
before an optimizer steps.

FSDP2 gathers the parameters of the root in the forward pass of the model. A module inside that is
called by itself (``model.encoder(tokens)``, as `generate` of an encoder-decoder does, or the model
inside of an adapter's) would find shards there, next to plain inputs.

Weights that FSDP2 all-gathers in fp8 have one scale each, and each rank holds a shard: one
all-reduce computes the scales of all weights as a forward pass begins (torchao: one a weight).

torch's kernels for several tensors (``foreach``, ``fused``) take tensors of one mesh in a call. So
parameter groups are split by mesh during a step. Values that an optimizer writes into the first
part of a group are written into the group afterwards.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.machine.enums import FP8BackendType
from accel.plan.plan import Plan
from accel.precision.fp8 import import_torchao, linear_config
from accel.strategies.mesh.torch_internals import (
    Models,
    forget_scale,
    keep_requires_grad,
    make_root,
    outside_graphs,
    own_groups,
    param_groups,
    reduce_gradients_after,
)

T = TypeVar("T")


def fsdp_units(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP units of `model`, itself included."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: torch.nn.Module) -> None:
    """Free the gathered parameters of `model`; shards take their places, and stay frozen or not."""
    keep_requires_grad(param_groups([model]))
    for unit in fsdp_units(model):
        unit.reshard()


def reshard_after_evaluation(model: torch.nn.Module) -> None:
    """Let forward passes of `model` without gradients end by resharding."""

    def after(module: torch.nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled():
            reshard(module)

    model.register_forward_hook(after)


def train_what_requires_gradients(model: torch.nn.Module) -> None:
    """Let each forward pass of a unit of `model` train what requires gradients then."""

    def before(unit: torch.nn.Module, *_: object) -> None:
        if isinstance(unit, FSDPModule):
            keep_requires_grad(own_groups(unit))

    for unit in fsdp_units(model):
        unit.register_forward_pre_hook(before, prepend=True)  # type: ignore[attr-defined]


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
            keep_requires_grad(own_groups(model))
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


def gathers_in_fp8(plan: Plan, offloads: bool) -> bool:
    """Return whether the weights of a run are gathered in fp8 and lie where they are computed."""
    fp8: Any = plan.fp8
    if fp8.backend != FP8BackendType.AO or offloads:
        return False
    return bool(linear_config(fp8.recipe, plan.device).enable_fsdp_float8_all_gather)


def scale_before_forwards(model: torch.nn.Module) -> None:
    """Let each forward pass of `model` begin with the scales of the weights that it gathers."""
    model.register_forward_pre_hook(_scale, prepend=True)


@outside_graphs
def _scale(model: torch.nn.Module, *_: object) -> None:
    import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def forget_scales(model: torch.nn.Module) -> None:
    """Let torchao compute the scales of `model`, whose weights have changed, as it gathers them.

    So it does where a part of the model is called by itself.
    """
    layer_kind = import_torchao("torchao.float8.float8_linear").Float8Linear
    for module in model.modules():
        if isinstance(module, layer_kind):
            forget_scale(module.weight)


def forget_after_steps(optimizer: torch.optim.Optimizer, models: Models) -> None:
    """Let each step of `optimizer` end without the scales of the weights before it."""

    def after(*_: object) -> None:
        for model in models:
            forget_scales(model)

    optimizer.register_step_post_hook(after)


Group = dict[str, Any]
# Optimizers with these hooks already: one may be prepared again.
_split_by_mesh: WeakSet[torch.optim.Optimizer] = WeakSet()


def step_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an elementwise optimizer of torch call torch's kernels once per mesh."""
    if optimizer in _split_by_mesh or not any(map(_is_foreach, optimizer.param_groups)):
        return
    _split_by_mesh.add(optimizer)
    saved: list[tuple[list[Group], list[list[Group]]]] = []

    def restore(own: torch.optim.Optimizer, *_: object) -> None:
        if saved:  # hooks are called twice where a subclass calls its parent's step
            own.param_groups, splits = saved.pop()
            for group, parts in zip(own.param_groups, splits, strict=True):
                group.update({**parts[0], "params": group["params"]})

    def split(own: torch.optim.Optimizer, *_: object) -> None:
        restore(own)  # a parent's step, or one after a step that failed
        splits = [list(_by_mesh(group)) for group in own.param_groups]
        saved.append((own.param_groups, splits))
        own.param_groups = [part for parts in splits for part in parts]

    optimizer.register_step_pre_hook(split)
    optimizer.register_step_post_hook(restore)


def _is_foreach(group: Group) -> bool:
    """Return whether torch updates a group by kernels for several tensors, or may choose to."""
    foreach, fused = group.get("foreach", False), group.get("fused")
    return bool(foreach or fused or (foreach is None and fused is None))


def _by_mesh(group: Group) -> Iterator[Group]:
    """Yield a group unchanged, or if torch may update it by ``foreach``, a part for each mesh."""
    meshes: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2 or not _is_foreach(group):
        yield group
        return
    for parameters in meshes.values():
        yield {**group, "params": parameters}
