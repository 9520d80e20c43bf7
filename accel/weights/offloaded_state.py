"""Weights of a model whose hooks offload them: whether there are any, and all of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from accel.machine.errors import StateError
from accel.weights.align import AlignDevicesHook
from accel.weights.hooks import hooks_of
from accel.weights.offload_folder import Info, OffloadedWeightsLoader, PathLike
from accel.weights.tensors import (
    Device,
    held_in,
    named_module_tensors,
    place_tensor,
    set_module_tensor_to_device,
)


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of a module that offload its weights."""
    every = hooks_of(module)
    return [one for one in every if isinstance(one, AlignDevicesHook) and one.offload]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook of a module offloads its weights; submodules do not count.

    Args:
        module: with or without a hook.
    """
    return bool(align_hooks(module))


def offloaded_names(model: nn.Module) -> list[str]:
    """Return the full names of the tensors that hooks of a model offload."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for hook in align_hooks(module)
        for name in hook.offloaded(module)
    ]


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: Device | None = None
) -> Iterator[None]:
    """Have the weights of one module on a device within the context; submodules do not count.

    Changes to offloaded weights are kept in memory; files that the weights lie in stay as they are.

    Args:
        module: with or without a hook.
        execution_device: where its weights are within; None: where its hook computes, or where
            they are. Those of a module that runs meanwhile stay where it runs.
    """
    hooks = align_hooks(module)
    if hooks:
        with _loaded(module, hooks, execution_device):
            yield
    elif execution_device is None:
        yield
    else:
        with _moved(module, execution_device):
            yield


@contextmanager
def _moved(module: nn.Module, device: Device) -> Iterator[None]:
    present = dict(named_module_tensors(module))
    try:
        for name in present:
            place_tensor(module, name, device)
        yield
    finally:
        for name, tensor in present.items():
            held, key = held_in(module, name)
            if held[key] is not tensor and not held[key].is_meta:
                tensor.data.copy_(held[key].data)
            held[key] = tensor


@contextmanager
def _loaded(
    module: nn.Module, hooks: list[AlignDevicesHook], device: Device | None
) -> Iterator[None]:
    with ExitStack() as loaded:
        for hook in hooks:
            own = hook.execution_device
            hook.execution_device = own if device is None else device
            try:
                hook.pre_forward(module)
            finally:
                hook.execution_device = own
            loaded.callback(hook.post_forward, module, ())
        yield


# -- state dicts ---------------------------------------------------------------------------


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with the weights that its hooks offload.

    Args:
        model: with or without hooks.

    Returns:
        Tensors by name; those that are offloaded lie on the CPU, mapped from their files.

    Raises:
        StateError: for weights on the meta device that no hook has, and for an offloaded weight
            that was assigned to another.
    """
    state: dict[str, torch.Tensor] = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for hook in align_hooks(module):
            names = hook.offloaded(module)
            given = hook.values_assigned(module, names)
            for name in names:
                for known in hook.all_names(name):
                    held = state.get(f"{start}{known}")
                    if held is not None and held.is_meta and known not in given:
                        state[f"{start}{known}"] = hook.weight(name)
    lacking = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if lacking:
        raise StateError(
            f"weights {lacking} are on the meta device, and no hook knows their values. "
            "Load a checkpoint into the model first."
        )
    return state


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, torch.Tensor],
    device_to_put_offload: Device = "cpu",
) -> MutableMapping[str, torch.Tensor]:
    """Put the weights of one module into a state dict, also offloaded ones.

    Args:
        module: with or without a hook.
        module_name: full name of one of its tensors, which tells the names of the others.
        state_dict: gets them.
        device_to_put_offload: where offloaded weights are put.

    Returns:
        The state dict.
    """
    path = module_name.rpartition(".")[0]
    start = f"{path}." if path else ""
    hooks = align_hooks(module)
    with _loaded(module, hooks, device_to_put_offload):
        for hook in hooks:
            hook.began_forward(module)  # nothing is written: no need to compare contents
        for name, tensor in named_module_tensors(module, remove_non_persistent=True):
            state_dict[f"{start}{name}"] = tensor.detach()
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Info] | None, offload_folder: PathLike
) -> None:
    """Load offloaded weights into a model, on the CPU.

    Args:
        model: has the weights, as on the meta device.
        index: entry by full name of a weight, as `offload_weight` makes them; empty or None: none.
        offload_folder: the folder with their files.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index or {})
    for name in weights:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])
