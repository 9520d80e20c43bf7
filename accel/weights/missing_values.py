"""Refuse tensors on the meta device whose values no hook and no folder has."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from accel.machine.errors import ConfigError, StateError, listed
from accel.weights.folder import OffloadedWeightsLoader, PathLike
from accel.weights.hooks import hooks_of, may_have_value
from accel.weights.offloaded_tensors import HELD, ORIGIN, is_left


def remember(tensor: torch.Tensor, weights: OffloadedWeightsLoader, name: str) -> None:
    """Note in a tensor without data where its values lie: its module may get another name.

    Args:
        tensor: of a module.
        weights: have its values.
        name: of it there.
    """
    tensor.__dict__.setdefault(ORIGIN, {})[name] = weights.source(name)


def check_left(model: nn.Module, folder: PathLike, given: Collection[str] = ()) -> None:
    """Refuse weights without data whose values do not lie where they were loaded to.

    By its present name in the folder, a weight whose layer was moved, or whose file another model
    has written since, would get the values of another.

    Args:
        model: without hooks of a dispatch.
        folder: of offloaded weights.
        given: names of weights that get other values.

    Raises:
        ConfigError: naming them.
    """
    names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    weights = OffloadedWeightsLoader(save_folder=folder)
    lost = [
        present[0]
        for tensor, present in names.values()
        if not any(name in given for name in present) and _is_lost(tensor, present, weights)
    ]
    if lost:
        raise ConfigError.of(
            f"offload_dir={os.fspath(folder)!r}, weights {listed(lost)}",
            "their values do not lie there as they were loaded: their layers were moved, or files "
            "were written or removed since",
            "Load the checkpoint anew; or dispatch the model before layers are moved or deleted.",
        )


def _is_lost(tensor: torch.Tensor, names: list[str], weights: OffloadedWeightsLoader) -> bool:
    if ORIGIN not in tensor.__dict__:
        return is_left(tensor)
    loaded = tensor.__dict__[ORIGIN]
    return any(name not in loaded or weights.source(name) != loaded[name] for name in names)


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
    """Return whether a hook of a module has a value of a tensor of its submodule at `path`."""
    return any(may_have_value(hook, module, _full(path, key)) for hook in hooks_of(module))


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
