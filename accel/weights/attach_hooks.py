"""Attach the hooks of a whole model: which module runs where, which weights are offloaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from accel.weights.device_map import lies_in
from accel.weights.folder import PrefixedDataset, Weights
from accel.weights.hooks import add_hook_to_module, hooks_of
from accel.weights.offload import AlignDevicesHook
from accel.weights.read_ahead import Block, ReadAhead
from accel.weights.tensors import (
    Device,
    TiedParams,
    find_shared_buffers,
    find_tied_parameters,
    held_in,
    named_module_tensors,
    owner_of,
)
from accel.weights.ties import LoadLock, TiedPlace, Ties

Keys = str | Iterable[str] | None
Places = list[TiedPlace]  # of one weight
# Modules of torch that use the weights of a submodule without calling it.
_DIRECT = (nn.MultiheadAttention,)
_NONE: Mapping[str, bool] = {}


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Bring the inputs of each module within a model to one device.

    Args:
        module: the model.
        execution_device: where its modules run.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: names of classes within whose instances nothing is attached.
        tied_params_map: the copies of tied weights by data pointer and device.
    """
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Bring inputs and weights to one device, for each module that has weights of its own.

    Args:
        module: the model, or a part of it.
        execution_device: where its modules run.
        offload: whether weights are offloaded but for the forward pass of their module.
        weights_map: weights by full name; None: those that the modules have.
        offload_buffers: whether buffers are offloaded with the weights.
        module_name: full name of the module in `weights_map`.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: names of classes whose instances load the weights of all their
            submodules at once, for those that use them without calling them.
        tied_params_map: the copies of tied weights by data pointer and device.
    """
    attacher = _Attacher(
        weights_map,
        offload_buffers,
        skip_keys,
        frozenset(preload_module_classes or ()),
        tied_params_map,
        (module, module_name),
    )
    attacher.layers(module, module_name, execution_device, offload)
    attacher.note_residents()


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Bring inputs and weights to the device of their block, block by block of a model.

    Args:
        module: the model, or a part of it.
        execution_device: where all blocks run, or by full name of a block.
        offload: whether blocks are offloaded, all or by full name of a block.
        weights_map: weights by full name; None: those that the modules have.
        offload_buffers: whether buffers are offloaded with the weights.
        module_name: full name of the module in the mappings.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: as of `attach_align_device_hook`.
        tied_params_map: the copies of tied weights by data pointer and device.
    """
    attacher = _Attacher(
        weights_map,
        offload_buffers,
        skip_keys,
        frozenset(preload_module_classes or ()),
        tied_params_map,
        (module, module_name),
    )
    devices, offloaded = execution_device, offload
    if not isinstance(devices, Mapping):
        names = offloaded if isinstance(offloaded, Mapping) else [module_name]
        devices = {} if devices is None else dict.fromkeys(names, devices)
    if not isinstance(offloaded, Mapping):
        offloaded = dict.fromkeys(devices, offloaded)
    attacher.blocks(module, module_name, devices, offloaded)
    attacher.note_residents()


@dataclass
class _Attacher:
    """What all hooks of a model have in common; the parameters are documented above."""

    weights_map: Weights | None
    offload_buffers: bool
    skip_keys: Keys
    preload: frozenset[str]
    tied: TiedParams | None
    root: tuple[nn.Module, str]  # and its name in the weights map
    ahead: ReadAhead = field(default_factory=ReadAhead)
    lock: LoadLock = field(default_factory=LoadLock)
    ties: Ties = field(default_factory=Ties)
    loaded_whole: list[str] = field(default_factory=list)  # modules that load all within
    adapts: bool = field(init=False)
    tied_places: Mapping[str, Places] = field(init=False)
    shared: Collection[str] = field(init=False)

    def __post_init__(self) -> None:
        # As the model is before its first hook.
        model, name = self.root
        self.adapts = _adapts(model)
        self.tied_places = _ties(model, name)
        self.note_residents()
        self.shared = {_below(name, one) for group in find_shared_buffers(model) for one in group}

    def note_residents(self) -> None:
        """Note the tied weights that stay: before hooks are attached, and after, as they move."""
        self.ties.note_residents(one for places in self.tied_places.values() for one in places)

    def blocks(
        self,
        module: nn.Module,
        name: str,
        devices: Mapping[str, Device],
        offloaded: Mapping[str, bool],
        away: bool = False,
        device: Device | None = None,
    ) -> None:
        """Hook the blocks within; the block around is offloaded if `away`, and on `device`."""
        device = devices.get(name, device)
        placed = name in devices and name in offloaded
        # A module around that loads all within may use a weight without calling its module.
        is_loaded = any(lies_in(name, one) for one in self.loaded_whole)
        if placed and offloaded[name] and not is_loaded:
            others = {one: offloaded[one] for one in devices if one in offloaded and one != name}
            self.layers(module, name, device, True, others)
        elif placed and not offloaded[name]:
            self._block(module, name, devices[name])
        away = offloaded[name] if placed else away
        if not away and not is_loaded:
            self._tensors(module, name, device, offloaded)
        if not name and (away or not placed):
            align_inputs(module, device, self.skip_keys, self.tied)
        for key, child in module.named_children():
            self.blocks(child, _below(name, key), devices, offloaded, away, device)

    def _tensors(
        self, module: nn.Module, name: str, device: Device | None, offloaded: Mapping[str, bool]
    ) -> None:
        """Hook a module that stays if some of its own weights are offloaded, each by its name."""
        own = [*module._parameters, *module._buffers]
        stay = frozenset(key for key in own if not offloaded.get(_below(name, key), False))
        if len(stay) < len(own):
            self._layer(module, name, device, True, whole=False, stay=stay)

    def _block(self, module: nn.Module, name: str, device: Device) -> None:
        """Place a block that is not offloaded; its modules move what is made within, too."""
        hook = AlignDevicesHook(
            device,
            io_same_device=not name,
            place_submodules=True,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
        )
        add_hook_to_module(module, hook, append=True)
        attach_execution_device_hook(module, device, self.skip_keys, self.preload, self.tied)

    def layers(
        self,
        module: nn.Module,
        name: str,
        device: Device | None,
        offload: bool,
        others: Mapping[str, bool] = _NONE,
    ) -> None:
        """Hook every module within that has weights of its own, or loads those of all within.

        `others`: whether blocks and weights within that have a place of their own are offloaded, by
        their full names.
        """
        whole = offload and (type(module).__name__ in self.preload or isinstance(module, _DIRECT))
        whole = whole and next(module.children(), None) is not None
        if whole:
            self.loaded_whole.append(name)
        if whole or _has_own_tensors(module):
            self._layer(module, name, device, offload, whole, _apart(module, name, others))
        for key, child in () if whole else module.named_children():
            if _below(name, key) not in others:
                self.layers(child, _below(name, key), device, offload, others)

    def _trained(self, module: nn.Module) -> list[str]:
        """Return the weights that train while others are frozen: adapters, which stay."""
        own = module.named_parameters() if self.adapts else ()
        return [
            name for name, parameter in own if parameter.requires_grad and not parameter.is_meta
        ]

    def _shared(self, module: nn.Module, prefix: str) -> list[str]:
        """Return the buffers that several modules have: each would offload values of its own."""
        names = (name for name, _ in module.named_buffers(remove_duplicate=False))
        return [name for name in names if f"{prefix}{name}" in self.shared]

    def _layer(
        self,
        module: nn.Module,
        name: str,
        device: Device | None,
        offload: bool,
        whole: bool,
        stay: frozenset[str],
    ) -> None:
        """Hook one module; `stay`: names, in the module, of weights that are not offloaded."""
        prefix = f"{name}." if name else ""
        given = self.weights_map
        hook = AlignDevicesHook(
            device,
            offload=offload,
            weights_map=None if given is None else PrefixedDataset(given, prefix),
            offload_buffers=self.offload_buffers,
            place_submodules=whole,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
            kept=stay.union(self._trained(module), self._shared(module, prefix))
            if offload
            else frozenset(),
        )
        names = hook.offloaded(module) if offload else []
        hook.lock = self.lock
        places = self.tied_places
        hook.tied = {n: places[prefix + n] for n in names if prefix + n in places}
        size = sum(held[key].nbytes for held, key in (held_in(module, n) for n in names))
        # In place of what brings inputs alone, of a block around: peft knows a single hook.
        alone = offload and device is not None and all(map(_brings_inputs, hooks_of(module)))
        add_hook_to_module(module, hook, append=not alone)
        hook.ties = self.ties
        for first in hook.tied:
            for one in hook.all_names(first):
                self.ties.offload(owner_of(module, one), hook, one)
        if names and hook.weights_map is not None:
            block = Block(tuple(names), hook.weights_map, "cpu" if device is None else device, size)
            hook.read_ahead = self.ahead, self.ahead.register(block)


def align_inputs(
    model: nn.Module,
    device: Device | None = None,
    skip_keys: Keys = None,
    tied: TiedParams | None = None,
) -> None:
    """Move the inputs of a model to its first device, and its outputs back.

    The hook that offloads weights of the model's own does that, too: transformers finds them in
    the weights map of the model's only hook.
    """
    for own in hooks_of(model):
        if isinstance(own, AlignDevicesHook) and own.offload:
            own.io_same_device = True
            return
    hook = AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys, tied_params_map=tied)
    add_hook_to_module(model, hook, append=True)


def _brings_inputs(hook: object) -> bool:
    return isinstance(hook, AlignDevicesHook) and not (
        hook.offload or hook.io_same_device or hook.place_submodules
    )


def _adapts(model: nn.Module) -> bool:
    """Return whether some parameters of a model train and others are frozen."""
    return len({parameter.requires_grad for parameter in model.parameters()}) == 2


def _ties(model: nn.Module, name: str) -> dict[str, Places]:
    """Return all places of each tied weight, by all of its full names."""
    prefix = f"{name}." if name else ""
    ties: dict[str, Places] = {}
    for group in find_tied_parameters(model):
        places = [owner_of(model, one) for one in group]
        ties |= {f"{prefix}{one}": places for one in group}
    return ties


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _apart(module: nn.Module, name: str, others: Mapping[str, bool]) -> frozenset[str]:
    """Return the tensors of a module that stay, as the longest entry within that fits says."""

    def stays(tensor: str) -> bool:
        entry = _below(name, tensor)
        while entry != name and entry not in others:
            entry = entry.rpartition(".")[0]
        return entry != name and not others[entry]

    return frozenset(one for one, _ in named_module_tensors(module, recurse=True) if stays(one))


def _has_own_tensors(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in own)
