"""The parameters and buffers of a module, one by one: list, place, tie, create on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.logging import get_logger
from accel.machine import env
from accel.machine.device import default_device_type
from accel.machine.errors import ConfigError, StateError, nearest
from accel.machine.memory import clear_device_cache
from accel.precision.wrapping import compiled_from, is_compiled_module
from accel.weights.hooks import hooks_of
from accel.weights.offloaded_tensors import (
    HELD,
    OffloadedValue,
    OffloadedWeight,
    plain,
)

_EXAMPLES = ("float32", "float16", "bfloat16", "float64")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype, also by its name with or without "torch."; raise `ConfigError` if unknown."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        rule = "it is a dtype of torch"
        raise ConfigError.of(f"dtype={dtype!r}", rule, nearest(dtype, _EXAMPLES))
    return found


logger = get_logger(__name__)

Device = torch.device | str | int
Held = MutableMapping[str, Any]  # tensors or None, by name
# Data pointer of a tied weight → the weight by the device that it was copied to.
TiedParams = dict[int, dict[torch.device, torch.Tensor]]


def as_device(device: Device) -> torch.device:
    """Return a device; a number is that of the machine's accelerator."""
    if isinstance(device, int):
        return torch.device(default_device_type(), device)
    return torch.device(device)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one: "cuda" is the current one of its kind.

    Args:
        first_device: with or without an index.
        second_device: with or without an index.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type in ("cpu", "meta"):
        return True
    return _index(first_device) == _index(second_device)


def _index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0


# -- listing -------------------------------------------------------------------------------


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module by name.

    Args:
        module: the module.
        include_buffers: whether buffers come after the parameters.
        recurse: whether those of submodules are included.
        remove_non_persistent: whether buffers that a state dict lacks are left out.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    lacking = get_non_persistent_buffers(module, recurse, fqns=True)
    for name, buffer in module.named_buffers(recurse=recurse):
        if not (remove_non_persistent and name in lacking):
            yield name, buffer


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of the buffers that a state dict lacks.

    Args:
        module: the module.
        recurse: whether those of submodules are included.
        fqns: whether names are full, such as "layers.0.mask", not "mask".
    """
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{path}.{name}" if fqns and path else name
        for path, owner in modules
        for name in owner._non_persistent_buffers_set
    }


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor `name`, and its name there."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return compiled_from(owner) if is_compiled_module(owner) else owner, key


def held_in(module: nn.Module, name: str) -> tuple[Held, str]:
    """Return the dictionary that holds the tensor `name`, and its key there; else `ConfigError`."""
    owner, key = owner_of(module, name)
    for held in (owner._parameters, owner._buffers):
        if key in held:
            return held, key
    known = [*owner._parameters, *owner._buffers]
    raise ConfigError.of(
        f"tensor_name={name!r}",
        f"{type(owner).__name__} does not have a parameter or a buffer named {key}",
        nearest(key, known),
    )


# -- placing -------------------------------------------------------------------------------


def like(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` as what `old` is: a parameter of its class and attributes, or a buffer."""
    data = plain(data)
    if not isinstance(old, nn.Parameter):
        return data.detach()
    trains = old.requires_grad and (data.is_floating_point() or data.is_complex())
    if type(old) is nn.Parameter or isinstance(old, (OffloadedWeight, OffloadedValue)):
        fresh: torch.Tensor = nn.Parameter(data.detach(), requires_grad=trains)
    else:
        fresh = torch.Tensor._make_subclass(type(old), data.detach(), trains)
    fresh.__dict__.update(old.__dict__)
    return fresh


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of a module on a device, with another value if given.

    A parameter keeps its class, attributes and `requires_grad`; one that stays as it is keeps its
    identity. A value of the right device and dtype is taken without a copy. The value of a tensor
    that a hook offloads goes to the hook's weights map, and the tensor stays offloaded.

    Args:
        module: the module, or one that contains it.
        tensor_name: full name, such as "layers.0.weight".
        device: where to; a number is that of the machine's accelerator.
        value: the new value; None: the present one.
        dtype: of the new value, where it is floating; None: the present one.
        fp16_statistics: scales of an 8-bit weight, kept with it as ``SCB``.
        tied_params_map: the copies of tied weights by data pointer and device, reused and added to.
        non_blocking: whether the copy overlaps with computation (wants pinned memory).
        clear_cache: whether cached memory of the accelerator is given back, where something left
            it.

    Raises:
        ConfigError: if there is no such tensor, its shape is another, or it is on the meta device
            and no value is given.
        StateError: if it is offloaded, and by a hook of a module around `module`.
    """
    old = get_tensor(module, tensor_name)
    if value is not None and old is not None and old.is_meta and as_device(device).type != "meta":
        _check(tensor_name, old, value, as_device(device))
        kept = as_dtype(dtype or old.dtype) if value.is_floating_point() else value.dtype
        if _write(module, tensor_name, value.to(kept)):
            return
        if isinstance(old, HELD):
            raise StateError(
                f"{tensor_name!r} is offloaded by a hook of a module around this one. Pass the "
                "whole model and the full name of the tensor."
            )
    place_tensor(
        module,
        tensor_name,
        device,
        value,
        dtype,
        fp16_statistics,
        tied_params_map,
        non_blocking,
        clear_cache,
    )


def get_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter or buffer by its full name; None where one is registered as None."""
    held, key = held_in(module, name)
    tensor: torch.Tensor | None = held[key]
    return tensor


def _write(module: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Return whether a hook on the way to a tensor offloads it, and now has it with this value."""
    path = name.split(".")
    for depth in range(len(path)):
        owner = module.get_submodule(".".join(path[:depth]))
        for hook in hooks_of(owner):
            write = getattr(hook, "write", None)
            if write is not None and write(owner, ".".join(path[depth:]), value):
                return True
    return False


def place_tensor(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Do what `set_module_tensor_to_device` does, also within hooks that offload the tensor."""
    held, key = held_in(module, tensor_name)
    old = held[key]
    if old is None:
        raise ConfigError.of(
            f"tensor_name={tensor_name!r}", "it is registered as None", "Leave it out."
        )
    target = as_device(device)
    source = old if value is None else value
    _check(tensor_name, old, value, target)
    copies = (tied_params_map or {}).get(source.data_ptr()) if not source.is_meta else None
    if copies is not None and target in copies:
        held[key] = copies[target]
        return
    kept = old.dtype if dtype is None or not source.is_floating_point() else as_dtype(dtype)
    if value is not None or not check_device_same(old.device, target) or kept != old.dtype:
        moved = source.to(target, kept if value is not None or dtype else None, non_blocking)
        held[key] = like(old, moved)
    if fp16_statistics is not None:
        held[key].SCB = fp16_statistics.to(target)
    if copies is not None and target.type != "meta":
        copies[target] = held[key]
    if clear_cache and _leaves(old.device, target):
        clear_device_cache()


def _leaves(device: torch.device, target: torch.device) -> bool:
    """Return whether what was on `device` gave memory of an accelerator back."""
    return device.type not in ("cpu", "meta") and device != target


def _check(name: str, old: torch.Tensor, value: torch.Tensor | None, target: torch.device) -> None:
    if value is None and old.is_meta and target.type != "meta":
        raise ConfigError.of(
            f"{name} is on the meta device",
            f"we need a `value` to put in on {target}",
            "Pass value=, or load a checkpoint first.",
        )
    if value is not None and value.shape != old.shape and not hasattr(old, "quant_state"):
        raise ConfigError.of(
            f"Trying to set a tensor of shape {value.shape} in {name!r}",
            f"which has shape {old.shape}, this looks incorrect",
            "Build the model as it was when it was saved.",
        )


# -- tied weights --------------------------------------------------------------------------


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what tells the memory of a tensor from all others: device, address and bytes.

    Args:
        tensor: any tensor; one on the meta device has the address of the object.
    """
    if tensor.is_meta:
        return tensor.device, id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Return the groups of names under which one parameter is registered.

    Args:
        model: the model.
        kwargs: accepted for the documented call; nothing else is needed.

    Returns:
        Sorted names of each tied parameter, such as ``[["embed.weight", "head.weight"]]``.
    """
    groups = names_by_tensor(model.named_parameters(remove_duplicate=False))
    return [sorted(group) for group in groups if len(group) > 1]


def names_by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Return the names of each tensor, in their order.

    Args:
        named: names and tensors, which may have several.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def find_shared_buffers(model: nn.Module) -> list[list[str]]:
    """Return the groups of names under which one buffer is registered by several modules.

    Args:
        model: the model.
    """
    groups = names_by_tensor(model.named_buffers(remove_duplicate=False))
    return [group for group in groups if len({id(owner_of(model, name)[0]) for name in group}) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie parameters again whose tie was broken, as by loading or by hooks.

    Args:
        model: the model.
        tied_params: groups of names, as of `find_tied_parameters`; the first that has data is kept.
    """
    for group in tied_params:
        places = [held_in(model, name) for name in group]
        present = [held[key] for held, key in places]
        loaded = next((one for one in present if one is not None and not one.is_meta), None)
        for held, key in places if loaded is not None else ():
            held[key] = loaded


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model of transformers ties its embeddings.

    Args:
        model: any model; one without such a configuration ties nothing.
    """
    config = getattr(model, "config", None)
    decoder = getattr(config, "get_text_config", None)
    text = decoder() if callable(decoder) else config
    wanted = any(getattr(one, "tie_word_embeddings", False) for one in (config, text))
    has_head = getattr(model, "get_output_embeddings", None)
    return bool(wanted and callable(has_head) and has_head() is not None)


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of tied parameters that a device map puts on different devices.

    Args:
        tied_params: groups of names, as of `find_tied_parameters`.
        device_map: device by name of a submodule.

    Raises:
        ConfigError: if the map has no device for one of them.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Please modify your custom device "
                "map or set `device_map='auto'`.",
                devices,
            )


def device_of(name: str, device_map: Mapping[str, Device]) -> Device:
    """Return the device of the longest entry of a map that `name` lies in; else `ConfigError`."""
    prefix = name
    while prefix:
        if prefix in device_map:
            return device_map[prefix]
        prefix = prefix.rpartition(".")[0]
    if "" not in device_map:
        raise ConfigError.of(
            f"The `device_map` does not contain the module {name!r}", "each has a device", "Add it."
        )
    return device_map[""]


def other_names(module: nn.Module, names: Iterable[str], recurse: bool) -> dict[str, list[str]]:
    """Return the other names that some tensors have in a module, by the one in `names`.

    Args:
        module: has the tensors.
        names: one of each, in the module.
        recurse: whether names in submodules are returned, too.
    """
    held = {id(get_tensor(module, name)): name for name in names}
    every = [
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    ]
    found: dict[str, list[str]] = {}
    for name, tensor in every:
        first = held.get(id(tensor), name)
        if first != name:
            found.setdefault(first, []).append(name)
    return found


_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of modules that are built within on the meta device, without memory.

    A model built so cannot compute before weights are loaded into it.

    Args:
        include_buffers: whether buffers go there, too, and other tensors made within; None: as
            the variable ACCELERATE_INIT_INCLUDE_BUFFERS says.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of modules that are built within on a device.

    Args:
        device: where to.
        include_buffers: whether buffers go there, too, and other tensors made within; None: as
            the variable ACCELERATE_INIT_INCLUDE_BUFFERS says.
    """
    target = as_device(device)
    buffers = env.flag(_VARIABLE) if include_buffers is None else include_buffers
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        present = module._parameters[name]
        if present is not None and present.device != target:
            moved = like(present, present.to(target))
            module._parameters[name] = moved  # type: ignore[assignment] # of the class it has

    def buffer_on_device(module: nn.Module, name: str, tensor: Any, *args: Any, **kw: Any) -> None:
        register_buffer(module, name, tensor, *args, **kw)
        if tensor is not None:
            module._buffers[name] = tensor.to(target)

    try:
        nn.Module.register_parameter = on_device  # type: ignore[assignment, method-assign]
        if not buffers:
            yield
            return
        nn.Module.register_buffer = buffer_on_device  # type: ignore[assignment, method-assign]
        with target:
            yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
