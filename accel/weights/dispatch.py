"""Spread a model over devices, memory and disk, run it there, and undo that."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accel.logging import get_logger
from accel.machine.device import default_device_type
from accel.machine.errors import ConfigError, StateError, listed
from accel.precision.wrapping import is_dispatched
from accel.weights.attach_hooks import (
    Keys,
    align_inputs,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from accel.weights.device_hooks import CpuOffload, UserCpuOffloadHook
from accel.weights.device_map import ELSEWHERE, DeviceMap, check_device_map
from accel.weights.folder import (
    Info,
    OffloadedWeightsLoader,
    Weights,
    in_memory,
    offload_state_dict,
)
from accel.weights.hooks import (
    SequentialHook,
    add_hook_to_module,
    check_removable,
    hooks_of,
    remove_hook_from_module,
)
from accel.weights.offload import AlignDevicesHook
from accel.weights.offloaded_tensors import CANNOT_MOVE, STORED_AS
from accel.weights.tensors import (
    Device,
    TiedParams,
    as_device,
    check_tied_parameters_on_same_device,
    device_of,
    find_shared_buffers,
    find_tied_parameters,
    get_non_persistent_buffers,
    held_in,
    named_module_tensors,
    names_by_tensor,
    retie_parameters,
    set_module_tensor_to_device,
)

logger = get_logger(__name__)

_MOVES = ("to", "cpu", "cuda")  # methods of a module


def undo(model: nn.Module) -> None:
    """Undo an earlier dispatch: its hooks are removed, and weights lie where it had them.

    Other hooks stay.

    Args:
        model: dispatched or not.

    Raises:
        StateError: for an offloaded weight that was assigned to another; nothing is undone.
    """
    check_removable(model)
    for module in model.modules():
        others = [hook for hook in hooks_of(module) if not isinstance(hook, AlignDevicesHook)]
        if len(others) < len(hooks_of(module)):
            remove_hook_from_module(module)
            if others:
                hook = others[0] if len(others) == 1 else SequentialHook(*others)
                add_hook_to_module(module, hook)
    for name in _MOVES:
        if isinstance(model.__dict__.get(name), _Guarded):
            delattr(model, name)
    model.__dict__.pop("hf_device_map", None)


class _Guarded:
    """`to`, `cpu` or `cuda` of a dispatched model, whose hooks would not know of a move."""

    def __init__(self, model: nn.Module, name: str) -> None:
        functools.update_wrapper(self, getattr(type(model), name))
        self.model = model
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        # A decorated method, as of transformers, is found under its class alone.
        return {"model": self.model, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # it is made in full

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        # Another dtype alone is no move: weights are converted when they are loaded.
        given = (*args, *kwargs.values())
        moves = not given or not all(isinstance(one, (torch.dtype, bool)) for one in given)
        tensors = named_module_tensors(self.model, recurse=True)
        if moves and any(tensor.is_meta for _, tensor in tensors):
            raise StateError(CANNOT_MOVE)
        if moves and is_dispatched(self.model):
            logger.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
        moved: nn.Module = getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        return moved


def guard(model: nn.Module) -> None:
    """Refuse to move a dispatched model as a whole.

    Args:
        model: gets its own `to`, `cpu` and `cuda`.
    """
    for name in _MOVES:
        setattr(model, name, _Guarded(model, name))


PathLike = str | os.PathLike[str]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model in memory, and each on a device while its module computes.

    Args:
        model: its parameters are on the meta device afterwards.
        execution_device: where modules run; None: that of the first parameter.
        offload_buffers: whether buffers are offloaded with the weights.
        state_dict: weights by full name; None: those of the model.
        preload_module_classes: names of classes whose instances load the weights of all their
            submodules at once, for those that use them without calling them.

    Returns:
        The model.

    Raises:
        ConfigError: for weights or non-persistent buffers without a value.
    """
    undo(model)
    weights = dict(state_dict) if isinstance(state_dict, dict) else state_dict  # it may be changed
    if weights is None:
        state = model.state_dict().items()
        weights = {name: value.to("cpu") for name, value in state if not value.is_meta}
    _check_values(model, weights)
    _load_buffers(model, weights, offload_buffers)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model on disk, and each on a device while its module computes.

    Args:
        model: its parameters are on the meta device afterwards.
        offload_dir: where the weights are written, or were: a model without data is read from
            there.
        execution_device: where modules run; None: that of the first parameter.
        offload_buffers: whether buffers are offloaded with the weights.
        preload_module_classes: as of `cpu_offload`.

    Returns:
        The model.

    Raises:
        ConfigError: for weights or non-persistent buffers without a value.
    """
    undo(model)
    _check_moved(model)
    weights = _with_disk(dict(model.state_dict()), {}, offload_dir, None)
    _check_values(model, weights, offload_dir)
    _load_buffers(model, weights, offload_buffers)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload(
    model: nn.Module,
    execution_device: Device | None,
    offload_buffers: bool,
    weights: Weights,
    preload: Collection[str] | None,
) -> nn.Module:
    device = _first_device(model) if execution_device is None else execution_device
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload,
        tied_params_map=_tied_params(model, []),
    )
    align_inputs(model)
    guard(model)
    return model


def _first_device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None or first.is_meta:
        return torch.device(default_device_type())
    return first.device


def _with_disk(
    state: Mapping[str, torch.Tensor],
    in_memory: Mapping[str, torch.Tensor],
    folder: PathLike | None,
    index: Mapping[str, Info] | None,
) -> OffloadedWeightsLoader:
    """Return weights in memory and those of `state` on disk; what has data is written first."""
    loaded = {name: value for name, value in state.items() if not value.is_meta}
    if loaded and folder is not None and index is None:
        offload_state_dict(folder, loaded)
    return OffloadedWeightsLoader(in_memory, folder, index)


def _check_values(
    model: nn.Module, weights: Weights | None = None, folder: PathLike | None = None
) -> None:
    """Refuse weights whose values neither the model nor the offloaded weights have, and buffers.

    With one on the meta device a forward pass ends with an error of torch, or computes from
    whatever lies in memory. Non-persistent buffers are in no state dict, and never offloaded.
    """
    empty = get_non_persistent_buffers(model, recurse=True, fqns=True)
    empty &= {name for name, buffer in model.named_buffers() if buffer.is_meta}
    if empty:
        raise ConfigError.of(
            f"non-persistent buffers {listed(sorted(empty))}",
            "they are on the meta device, and neither checkpoints nor offloaded weights have them",
            "Initialize the model with init_empty_weights(include_buffers=False), or give them "
            "values first: set_module_tensor_to_device(model, name, 'cpu', value).",
        )
    known: Weights = {} if weights is None else weights

    def lacks(name: str) -> bool:
        return name not in known or (in_memory(known, name) and known[name].is_meta)

    lacking = [name for name, value in model.state_dict().items() if value.is_meta and lacks(name)]
    if lacking:
        given = "" if folder is None else f"offload_dir={os.fspath(folder)!r}, "
        raise ConfigError.of(
            f"{given}weights {listed(lacking)}",
            "they have no values, neither in the model nor where offloaded weights lie",
            "Load a checkpoint that has them (with this folder as offload_folder), or give them "
            "values first: set_module_tensor_to_device(model, name, 'cpu', value).",
        )


def _check_moved(model: nn.Module) -> None:
    """Refuse weights on the disk that lie there under other names: those are of other layers."""
    empty = {n: vars(v) for n, v in model.state_dict(keep_vars=True).items() if v.is_meta}
    moved = [name for name, known in empty.items() if name not in known.get(STORED_AS, [name])]
    if moved:
        raise ConfigError.of(
            f"weights {listed(moved)}",
            "they were loaded to the disk under other names: their layers were moved since",
            "Load the checkpoint again, or dispatch the model before layers are moved or deleted.",
        )


def _load_buffers(model: nn.Module, weights: Weights | None, offload_buffers: bool) -> None:
    """Load the persistent buffers that a model has no data for, and that no hook will load."""
    if weights is None:
        return
    groups = find_shared_buffers(model) if offload_buffers else None
    shared = None if groups is None else {name for group in groups for name in group}
    names = (name for name, _ in model.named_buffers(remove_duplicate=False))
    _load_values(model, [name for name in names if shared is None or name in shared], weights)


def _load_values(model: nn.Module, names: Iterable[str], weights: Weights) -> None:
    """Give those of some tensors that are on the meta device their values, under all their names.

    A weight that is tied to one that is offloaded stays tied to it.
    """
    wanted = set(names)
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for group in names_by_tensor((name, tensor) for name, tensor in named if tensor.is_meta):
        known = next((name for name in group if name in weights), None)
        if known is not None and not wanted.isdisjoint(group):
            set_module_tensor_to_device(model, known, "cpu", value=weights[known].clone())
            loaded, key = held_in(model, known)
            for held, other in (held_in(model, name) for name in group):
                held[other] = loaded[key]


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward pass, after which it stays on the device.

    For models that run in turn, some of them in a loop.

    Args:
        model: the model.
        execution_device: where it runs; None: the machine's accelerator.
        prev_module_hook: handle of the model before, which is sent to the CPU first.

    Returns:
        The model, and a handle to send it back to the CPU.

    Example:
        >>> model_1, hook_1 = cpu_offload_with_hook(model_1, "cuda")
        >>> model_2, hook_2 = cpu_offload_with_hook(model_2, "cuda", prev_module_hook=hook_1)
        >>> model_2(model_1(inputs)), hook_2.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


# -- device maps ---------------------------------------------------------------------------


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, Info] | None = None,
    offload_buffers: bool = False,
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put the submodules of a model where a device map says, and hook them to run there.

    Weights of modules on "cpu" lie in memory, and on the main device while their module computes;
    those on "disk" are mapped from files. Where some weights are frozen, those that train (LoRA)
    stay on the device of their module, so that they can be optimized. A dispatch undoes the one
    before.

    Args:
        model: its weights have data, but for those on disk.
        device_map: device by full name of a submodule or weight: a number, "cuda:0", "cpu", "disk";
            the longest name that fits holds.
        main_device: where modules on "cpu" and "disk" run; None: the first other device of the map.
        state_dict: weights of the modules on "cpu"; None: those of the model.
        offload_dir: folder of the weights on "disk", written unless the model has no data for them.
        offload_index: where weights on "disk" lie, whose values hold, also where the model has
            others; None: the index of `offload_dir`.
        offload_buffers: whether buffers are offloaded with the weights.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: as of `cpu_offload`.
        force_hooks: whether there are hooks also where one device has all.

    Returns:
        The model, with the map as its attribute ``hf_device_map``.

    Raises:
        ConfigError: for tensors without a device or a value, or on "disk" without a folder.
    """
    check_device_map(model, device_map)
    undo(model)
    _check_moved(model)
    placed = set(device_map.values())
    if len(placed) == 1 and placed != {"disk"} and not force_hooks:
        _load_missing(model, [*model.state_dict()], offload_dir, offload_index)
        _check_values(model)
        model.to(as_device(next(iter(placed))))
    else:
        spread = _Spread(model, device_map, main_device)
        _load_missing(model, spread.resident(), offload_dir, offload_index)
        weights = spread.weights(state_dict, offload_dir, offload_index)
        _check_values(model, weights, offload_dir)
        _load_buffers(model, weights, offload_buffers)
        ties = find_tied_parameters(model)
        check_tied_parameters_on_same_device(ties, device_map)
        attach_align_device_hook_on_blocks(
            model,
            execution_device=spread.execution_devices(),
            offload=spread.offloaded(),
            weights_map=weights,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=_tied_params(model, ties),
        )
        _retie(model, ties)
        guard(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment] # no tensor
    return model


def _load_missing(
    model: nn.Module,
    names: Iterable[str],
    folder: PathLike | None,
    index: Mapping[str, Info] | None,
) -> None:
    """Load those of some weights that a model has no data for, where they were offloaded to."""
    state = model.state_dict()
    lacking = [name for name in names if state[name].is_meta]
    if lacking and (folder is not None or index is not None):
        _load_values(model, lacking, OffloadedWeightsLoader(save_folder=folder, index=index))


class _Spread:
    """What a device map means: where each submodule runs, and what is offloaded."""

    def __init__(self, model: nn.Module, device_map: DeviceMap, main: Device | None) -> None:
        self.model = model
        self.device_map = device_map
        first = next((d for d in device_map.values() if str(d) not in ELSEWHERE), None)
        fallback = default_device_type() if set(device_map.values()) == {"disk"} else "cpu"
        self.main: Device = next(d for d in (main, first, fallback) if d is not None)
        on_cpu = as_device(self.main).type == "cpu"
        self.away = ("disk",) if on_cpu else ELSEWHERE

    def execution_devices(self) -> dict[str, Device]:
        devices = {
            name: self.main if str(device) in ELSEWHERE else device
            for name, device in self.device_map.items()
        }
        return {"": self.main, **devices}

    def offloaded(self) -> dict[str, bool]:
        return {name: str(device) in self.away for name, device in self.device_map.items()}

    def resident(self) -> list[str]:
        """Return the names of the tensors that stay where they run."""
        away = {name for device in self.away for name in self._within(device)}
        return [name for name in self.model.state_dict() if name not in away]

    def weights(
        self,
        state_dict: Mapping[str, torch.Tensor] | None,
        folder: PathLike | None,
        index: Mapping[str, Info] | None,
    ) -> Weights | None:
        """Return the offloaded weights, None if there are none."""
        on_disk = self._within("disk")
        if on_disk and folder is None and index is None:
            names = [name for name, device in self.device_map.items() if device == "disk"]
            raise ConfigError.of(
                f"device_map sends {', '.join(names)} to 'disk'",
                "We need an `offload_dir` to dispatch this model according to this `device_map`",
                "Pass offload_dir='offload'.",
            )
        in_memory: Mapping[str, torch.Tensor] = {}
        if "cpu" in self.away:
            given = {} if state_dict is None else state_dict
            in_memory = {**self._within("cpu"), **given}
        if not on_disk:
            return in_memory or None
        return _with_disk(on_disk, in_memory, folder, index)

    def _within(self, device: str) -> dict[str, torch.Tensor]:
        """Return the part of the model's state dict that the map puts on `device`."""
        state = self.model.state_dict().items()
        return {n: value for n, value in state if str(device_of(n, self.device_map)) == device}


def _tied_params(model: nn.Module, ties: list[list[str]]) -> TiedParams | None:
    """Return an entry for each address of what modules share, which hooks fill with its copies."""
    pointers: TiedParams = {}
    for group in (*ties, *find_shared_buffers(model)):
        for name in group:
            held, key = held_in(model, name)
            if not held[key].is_meta and held[key].numel() > 0:
                pointers[held[key].data_ptr()] = {}
    return pointers or None


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie again what is on one device; what is offloaded is tied where it is loaded."""
    for group in ties:
        tensors = [held[key] for held, key in (held_in(model, name) for name in group)]
        if len({tensor.device for tensor in tensors}) == 1 and not tensors[0].is_meta:
            retie_parameters(model, [group])
