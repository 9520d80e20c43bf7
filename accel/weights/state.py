"""State dicts of models whose weights are offloaded by hooks, or quantized by bitsandbytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from accel.machine.errors import CheckpointError, Problem, StateError
from accel.weights.folder import Info, OffloadedWeightsLoader, PathLike
from accel.weights.hooks import hooks_of
from accel.weights.offload import AlignDevicesHook
from accel.weights.tensors import (
    Device,
    held_in,
    name_of,
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


_WEIGHT, _SCALES, _FORMAT = "weight", "SCB", "weight_format"
_KINDS = ("Linear4bit", "Linear8bitLt")
State = Mapping[str, Any]  # values by name, tensors and others
_REMEDY = "Quantize the model as it was when it was saved."


def load_quantized(model: nn.Module, state: State) -> dict[str, Any]:
    """Load the entries of quantized layers from a state dict, in place.

    ``load_state_dict`` cannot: it copies codes only, not the scales that belong to them.

    Args:
        model: with or without quantized layers.
        state: values by name; may lack layers.

    Returns:
        The state dict that ``load_state_dict`` takes: scales are left out, and codes are the
        model's own. Without quantized layers, `state`.

    Raises:
        CheckpointError: for weights that are not quantized, or in another way; nothing is loaded.
    """
    rest = dict(state)
    problems = list[Problem]()
    found: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for name, layer in quantized_layers(model):
        prefix = f"{name}." if name else ""
        keys = [key for key in rest if key.startswith(prefix) and _is_code(key[len(prefix) :])]
        if keys:
            parts = {key[len(prefix) :]: rest.pop(key) for key in keys}
            problem = _misfit(name, layer, parts)
            problems += [problem] if problem else []
            found.append((layer, parts))
            rest[f"{prefix}{_WEIGHT}"] = layer.get_parameter(_WEIGHT).data
    if problems:
        raise CheckpointError("\n".join(map(str, problems)))
    for layer, parts in found:
        _load(layer, parts)
    return rest


class QuantizedParts:
    """Entries of quantized layers that come file by file: each layer's are loaded together.

    Args:
        model: with or without quantized layers.

    Attributes:
        awaited: names of the entries, of all layers.
        packed: those whose shape depends on their values.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = {
            name: {f"{name}.{key}" if name else key for key in _own(layer)}
            for name, layer in quantized_layers(model)
        }
        self.awaited = frozenset[str]().union(*self._layers.values())
        self.packed = frozenset(key for key in self.awaited if ".quant_state." in key)
        self._held = dict[str, torch.Tensor]()

    def load(self, part: State) -> dict[str, Any]:
        """Load the layers that are complete with `part`; return what ``load_state_dict`` takes."""
        others = {key: value for key, value in part.items() if key not in self.awaited}
        self._held |= {key: value for key, value in part.items() if key in self.awaited}
        ready = dict[str, torch.Tensor]()
        for names in self._layers.values():
            if {name for name in names if not name.endswith(_FORMAT)} <= self._held.keys():
                ready |= {name: self._held.pop(name) for name in names & self._held.keys()}
        return load_quantized(self.model, {**others, **ready})

    def finish(self) -> None:
        """Raise `CheckpointError` for layers of which some entries were lacking."""
        load_quantized(self.model, self._held)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the quantized linear layers of a model by full name."""
    bnb = sys.modules.get("bitsandbytes")
    kinds = () if bnb is None else tuple(getattr(bnb.nn, kind) for kind in _KINDS)
    for name, module in model.named_modules():
        if isinstance(module, kinds) and _is_quantized(module):
            yield name, module


def _is_quantized(layer: nn.Module) -> bool:
    weight = layer.get_parameter(_WEIGHT)
    return weight.dtype == torch.int8 or getattr(weight, "quant_state", None) is not None


def _is_code(key: str) -> bool:
    """Return whether an entry of a layer belongs to its quantized weight."""
    return key in (_WEIGHT, _SCALES, _FORMAT) or key.startswith(f"{_WEIGHT}.")


def _own(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the entries of the quantized weight in the state dict of its layer."""
    return {key: value for key, value in layer.state_dict().items() if _is_code(key)}


def _misfit(name: str, layer: nn.Module, parts: State) -> Problem | None:
    own = _own(layer)
    weight = parts.get(_WEIGHT)
    if own.keys() - {_FORMAT} != parts.keys() - {_FORMAT}:
        rule = f"the layer has {', '.join(sorted(own))}, which belong together"
        given = name_of(weight.dtype) if isinstance(weight, torch.Tensor) else "no codes"
        value = f"{name}: {', '.join(sorted(parts))} ({given})"
        remedy = "Load floating weights with load_and_quantize_model, and others as they were saved"
        return Problem(value, rule, f"{remedy}.")
    for key in filter(_is_sized, sorted(own)):
        given, wanted = parts[key], own[key]
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            value = f"{name}.{key}: {list(given.shape)} {name_of(given.dtype)}"
            rule = f"the layer has {list(wanted.shape)} {name_of(wanted.dtype)}"
            return Problem(value, rule, _REMEDY)
    state = getattr(layer.get_parameter(_WEIGHT), "quant_state", None)
    if state is not None and _form(_unpacked(parts)) != _form(state):
        rule = "the layer is quantized with another block size, dtype or shape"
        return Problem(f"{name}.weight", rule, _REMEDY)
    return None


def _is_sized(key: str) -> bool:
    """Return whether an entry has the same shape whatever its values; packed text has not."""
    return key != _FORMAT and not key.startswith("weight.quant_state.")


def _unpacked(parts: Mapping[str, torch.Tensor]) -> Any:
    """Return the quantization state of a 4-bit weight, as copies on the CPU."""
    from bitsandbytes.functional import QuantState

    entries = {key: value.detach().to("cpu", copy=True) for key, value in parts.items()}
    del entries[_WEIGHT]
    return QuantState.from_dict(entries, device=torch.device("cpu"))


def _form(state: Any) -> tuple[object, ...]:
    inner = state.state2
    second = None if inner is None else (inner.blocksize, inner.dtype)
    return state.quant_type, state.blocksize, state.dtype, tuple(state.shape), second


def _load(layer: Any, parts: Mapping[str, torch.Tensor]) -> None:
    weight = layer.weight
    # Codes of 8 bits are known under several names, mostly of one memory.
    copies = [weight.data, getattr(weight, "CB", None)]
    if _SCALES in parts:
        copies.append(layer.state.CB)
        for scales in (weight.SCB, layer.state.SCB):
            if scales is not None:
                scales.copy_(parts[_SCALES])
    for codes in copies:
        if codes is not None:
            codes.copy_(parts[_WEIGHT])
    if _SCALES not in parts:
        state = _unpacked(parts)
        state.to(weight.device)
        weight.quant_state = layer.quant_state = state
