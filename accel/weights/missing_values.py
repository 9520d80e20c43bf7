"""Refuse tensors on the meta device whose values no hook has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from accel.machine.errors import StateError, listed
from accel.weights.hooks import hooks_of
from accel.weights.offloaded_tensors import HELD


def check_hooked(model: nn.Module) -> None:
    """Refuse tensors that were added on the meta device after hooks were attached.

    As peft adds adapters, where the weight of their layer lies: a forward pass would compute from
    whatever lies in memory.

    Args:
        model: its modules have the hooks of a dispatch.

    Raises:
        StateError: with the names of the tensors.
    """
    suspects = {one for one in _suspects(model) if not _has_value(*one, "")}
    if not suspects:
        return
    names = [
        _full(path, key)
        for path, module in model.named_modules()
        for key in (*module._parameters, *module._buffers)
        if (module, key) in suspects and not _within(model, module, key)
    ]
    if names:
        raise StateError(
            f"{listed(names)} of {type(model).__name__}: on the meta device, and no hook has a "
            "value for it. Add adapters before dispatch_model, or give values "
            "(set_module_tensor_to_device(model, name, 'cpu', value)) and dispatch again."
        )


def refuse_assigned(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse what was assigned to offloaded tensors: the weights map has other values.

    Args:
        module: has the tensors.
        names: of them, in the module; none: nothing was.

    Raises:
        StateError: with the names.
    """
    if given := list(names):
        raise StateError(
            f"{', '.join(given)} of {type(module).__name__}: offloaded tensors were assigned, or "
            "are replaced by functional_call; their values come from the weights map. Set them by "
            "accel.utils.set_module_tensor_to_device(module, name, device, value); tie weights "
            "and swap layers after accel.hooks.remove_hook_from_submodules(model)."
        )


def _within(model: nn.Module, owner: nn.Module, key: str) -> bool:
    """Return whether a hook of a module around `owner` has a value of a tensor."""
    return any(
        _has_value(module, key, path)
        for module in model.modules()
        for path, one in module.named_modules()
        if one is owner
    )


def _has_value(module: nn.Module, key: str, path: str) -> bool:
    """Return whether a hook of a module may have a value of a tensor of its submodule at `path`.

    A hook of a user's own may have any of its module's.
    """
    return any(
        known(module, _full(path, key)) if known is not None else not path
        for known in (getattr(hook, "has_value", None) for hook in hooks_of(module))
    )


def _full(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _suspects(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield tensors on the meta device, as module and name, but for those of `HELD`."""
    modules, seen = [model], {model}
    while modules:
        module = modules.pop()
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items() if held else ():
                # The type first: a subclass's `is_meta` takes a hundred times as long.
                if tensor is not None and type(tensor) not in HELD and tensor.is_meta:
                    yield module, name
        for child in module._modules.values() if module._modules else ():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
