"""Wrappers around a user's module: those of a backend, and a forward pass under autocast."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel.comm.ops import convert_to_fp32
from accel.machine.imports import is_available

MakeContext = Callable[[], AbstractContextManager[object]]
Wrapper = TypeVar("Wrapper", bound=type[torch.nn.Module])
# Wrappers whose `module` attribute is what they wrap.
_COMPILED = "_orig_mod"  # the child of what `torch.compile` returns
PARALLEL_WRAPPERS: tuple[type[torch.nn.Module], ...] = (DistributedDataParallel, DataParallel)


def register_wrapper(kind: Wrapper) -> Wrapper:
    """Take modules of `kind` for wrappers whose `module` is what they wrap; return `kind`."""
    global PARALLEL_WRAPPERS
    if kind not in PARALLEL_WRAPPERS:
        PARALLEL_WRAPPERS = (*PARALLEL_WRAPPERS, kind)
    return kind


class WrappedForward:
    """A module's `forward` inside a context, its floating outputs converted to fp32 if wanted.

    An object and not a closure: a deep copy of the module (an average of its weights, say) then
    calls the copy's own `forward`, not the original's.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        make_context: MakeContext,
        outputs_in_fp32: bool = True,
    ) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.make_context = make_context
        self.outputs_in_fp32 = outputs_in_fp32

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self.make_context():
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs) if self.outputs_in_fp32 else outputs


def wrap_forward(
    model: torch.nn.Module, make_context: MakeContext, outputs_in_fp32: bool = True
) -> None:
    """Run `model.forward` in a context and return fp32, or the computed dtype; done once at most.

    `make_context` gives a fresh context for each call.
    """
    if not isinstance(model.__dict__.get("forward"), WrappedForward):
        model.forward = WrappedForward(model.forward, make_context, outputs_in_fp32)


def unwrap_forward(model: torch.nn.Module) -> None:
    """Give `model` the `forward` back that it had before `wrap_forward`."""
    wrapped = model.__dict__.get("forward")
    if not isinstance(wrapped, WrappedForward):
        return
    own = wrapped.forward
    if getattr(own, "__func__", None) is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.forward = own


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether hooks place the weights of a model, so that it must not be moved."""
    return any("_hf_hook" in vars(module) for module in model.modules())


def is_compiled_module(module: object) -> bool:
    """Return whether a module is what `torch.compile` returned.

    Args:
        module: any object.
    """
    return isinstance(module, torch.nn.Module) and _COMPILED in module._modules


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model, inside its containers, is one of peft.

    Args:
        model: prepared or not.
    """
    if not is_available("peft"):
        return False
    peft = importlib.import_module("peft")
    return isinstance(own_module(model), (peft.PeftModel, peft.PeftMixedModel))


def compiled_from(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` was given for `model`."""
    return model.get_submodule(_COMPILED)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Return the module inside its distributed containers.

    What is to be removed from the module itself (its forward pass under mixed precision, layers
    that are compiled in place) is then gone from the prepared model, too: they share their layers.

    Args:
        model: any module.
        keep_fp32_wrapper: whether a forward pass under mixed precision stays so.
        keep_torch_compile: whether a compiled module stays compiled, inside the containers or
            around them, and layers that are compiled in place.
        recursive: whether containers deeper in the module are removed from it, too.

    Returns:
        The user's own module.
    """
    model = _without_containers(model, keep_torch_compile)
    if recursive:
        _remove_containers(model)
    if not keep_torch_compile:
        _remove_compiled_calls(model)
    if not keep_fp32_wrapper:
        unwrap_forward(compiled_from(model) if is_compiled_module(model) else model)
    return model


def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: bool = False
) -> list[torch.nn.Module] | list[tuple[str, torch.nn.Module]]:
    """Return a module and all inside it, each after those inside it; `model` itself is the last.

    Args:
        model: any module.
        return_fqns: whether each is a pair with its full name, "" for `model`.
    """
    named = list(model.named_modules())[::-1]
    return named if return_fqns else [module for _, module in named]


def plain_name(name: str) -> str:
    """Return the full name of a weight or module without the parts that `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def hide_compiled(model: torch.nn.Module) -> None:
    """Have state dicts of `model` name the weights of compiled submodules as if not compiled.

    So a state is loaded with and without these compilations.
    """
    for module in model.modules():
        if is_compiled_module(module) and _rename_saved not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_rename_saved)
            module.register_load_state_dict_pre_hook(_rename_loaded)


def _rename_saved(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    start = f"{prefix}{_COMPILED}."
    for name in [name for name in state if name.startswith(start)]:
        state[prefix + name.removeprefix(start)] = state.pop(name)


def _rename_loaded(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    start = f"{prefix}{_COMPILED}."
    for name in [one for one in state if one.startswith(prefix) and not one.startswith(start)]:
        state[start + name.removeprefix(prefix)] = state.pop(name)


def own_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module, as it is inside its containers and `torch.compile`."""
    return _without_containers(model, keep_torch_compile=False)


def _without_containers(model: torch.nn.Module, keep_torch_compile: bool) -> torch.nn.Module:
    while True:
        if isinstance(model, PARALLEL_WRAPPERS):
            model = model.get_submodule("module")
        elif not is_compiled_module(model):
            return model
        elif not keep_torch_compile:
            model = compiled_from(model)
        else:
            return _compiled_without_containers(model)


def _compiled_without_containers(compiled: Any) -> torch.nn.Module:
    """Return what is inside the containers in a compiled module, compiled in the same way."""
    inner = _without_containers(compiled_from(compiled), keep_torch_compile=True)
    if inner is compiled_from(compiled):
        return compiled
    return inner if is_compiled_module(inner) else type(compiled)(inner, compiled.dynamo_ctx)


def _remove_compiled_calls(model: torch.nn.Module) -> None:
    """Undo the compilation of all modules in `model`, in place or around them."""
    for module in list(model.modules()):
        module.__dict__.pop("_compiled_call_impl", None)
        for name, child in module.named_children():
            if is_compiled_module(child) and not is_compiled_module(module):
                setattr(module, name, own_module(child))


def _remove_containers(model: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PARALLEL_WRAPPERS):
                setattr(parent, name, extract_model_from_parallel(child, recursive=True))
