"""The hook that brings inputs and weights to one device for a module's forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel.comm.ops import send_to_device
from accel.logging import get_logger
from accel.machine.errors import CheckpointError, StateError
from accel.machine.tree import iterate
from accel.weights.folder import Weights, in_memory, write_weight
from accel.weights.hooks import Arguments, ModelHook, outside_graphs
from accel.weights.missing_values import check_hooked, refuse_assigned
from accel.weights.offloaded_tensors import (
    are_alike,
    marked_offloaded,
    refuse_gradient,
    shares_storage,
)
from accel.weights.read_ahead import ReadAhead
from accel.weights.tensors import (
    Device,
    TiedParams,
    as_device,
    check_device_same,
    get_tensor,
    held_in,
    named_module_tensors,
    other_names,
    place_tensor,
)
from accel.weights.ties import (
    LoadedWeight,
    LoadLock,
    TiedPlace,
    Ties,
    content_of,
)


class LoadStateDict:
    """Takes a state dict's values of offloaded tensors, or reports those that have no place.

    Values that are offloaded already are compared; buffers, and what lies in memory, are written.
    torch then finds the tensors themselves, and leaves them as they are, also of those that are
    refused: it would assign values of ``assign=True``, or propose that.
    """

    def __init__(self, hook: AlignDevicesHook) -> None:
        self._offloading = hook

    def __call__(
        self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *others: Any
    ) -> None:
        refused, empty = list[str](), list[str]()
        assigns = bool(others[0].get("assign_to_params_buffers"))
        for name in self._offloading.offloaded(module):
            held, key = held_in(module, name)
            for full in (f"{prefix}{one}" for one in self._offloading.all_names(name)):
                value = state_dict.get(full)
                if value is None or value.shape != held[key].shape:
                    continue
                state_dict[full] = held[key]
                if value.is_meta:
                    if not shares_storage(value, held[key]):  # as in the model's own state dict
                        empty.append(full)
                elif not self._takes(module, name, value.to(held[key].dtype), assigns):
                    refused.append(full)
        error_messages: list[str] = others[-1]
        if empty:
            error_messages.append(
                f"{', '.join(empty)}: the state dict has no values of these weights, as they are "
                "offloaded or on the meta device where it is from. Pass what "
                "accel.utils.modeling.get_state_dict_offloaded_model(model) returns."
            )
        if refused:
            error_messages.append(
                f"{', '.join(refused)}: offloaded weights cannot be loaded into a dispatched model "
                "unless they are equal. Load them with accel.load_checkpoint_and_dispatch, or "
                "before dispatch_model."
            )

    def _takes(self, module: nn.Module, name: str, value: torch.Tensor, assigns: bool) -> bool:
        """Return whether an offloaded tensor has a value of a state dict now.

        To assign values unties: it is not written to a weight that stays and is tied to this one.
        """
        hook, (held, key) = self._offloading, held_in(module, name)
        with hook.lock:
            resident = hook.resident(name)
            if resident is not None and not assigns:
                with torch.no_grad():
                    resident.copy_(value)
                return True
            present = hook.weight(name).to(value.dtype)
            if torch.equal(content_of(present), content_of(value)):
                return True
            fits = in_memory(hook.weights_map, name) or not isinstance(held[key], nn.Parameter)
            return fits and name not in hook.tied and hook.write(module, name, value)


logger = get_logger(__name__)


class AlignDevicesHook(ModelHook):
    """Bring inputs and weights to one device for the forward pass, and offload weights after it.

    Weights are offloaded when the last forward pass of the module ends: several threads may run
    it. What a forward pass changes, such as running statistics, is kept in the weights map; of a
    parameter, what `LoadedWeight` finds without comparing its values.

    Args:
        execution_device: where the forward pass runs; None: inputs and weights stay.
        offload: whether the weights are on the meta device but for the forward pass.
        io_same_device: whether outputs go to the device of the inputs.
        weights_map: weights by name, also lazily; None: those that the module has.
        offload_buffers: whether buffers are offloaded with the weights.
        place_submodules: whether the weights of submodules are included.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        tied_params_map: the copies of tied weights by data pointer and device.
        kept: names of weights that stay on the device, as they train.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Weights | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Iterable[str] | None = None,
        tied_params_map: TiedParams | None = None,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.kept = kept
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._on_load: RemovableHandle | None = None
        # Of tied weights, by name: the modules that have them and their names there, this one too.
        self.tied: Mapping[str, Sequence[tuple[nn.Module, str]]] = {}
        self.ties = Ties()  # of the whole model
        self.restored: dict[str, Any] = {}  # what the module was given back, by name
        # Other names of an offloaded weight in the module, by the one that is loaded.
        self.aliases: Mapping[str, list[str]] = {}
        self.read_ahead: tuple[ReadAhead, int] | None = None  # and the number of this block
        self.lock = LoadLock()  # hooks of one model have one
        self._users = 0  # forward passes that use the loaded weights
        self._by_hand = False  # whether one of them is no forward pass, but a caller's own code
        self._loaded: dict[str, LoadedWeight] = {}
        self._left: dict[str, torch.Tensor] = {}  # without data, in the place of each weight

    def __getstate__(self) -> dict[str, object]:
        # Nobody uses the weights of a copy yet.
        return {**self.__dict__, "_users": 0, "_by_hand": False, "_loaded": {}}

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    # -- which tensors ---------------------------------------------------------------------

    def _all(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return named_module_tensors(module, recurse=self.place_submodules)

    def offloaded(self, module: nn.Module) -> list[str]:
        """Return the names of the tensors that are offloaded between forward passes."""
        tensors = named_module_tensors(
            module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
        )
        known = self.original_devices  # what was added since stays
        return [
            name for name, _ in tensors if name not in self.kept and (not known or name in known)
        ]

    def all_names(self, name: str) -> list[str]:
        """Return the name of an offloaded tensor, and its other names in the module."""
        return [name, *self.aliases.get(name, ())]

    def _place(self, module: nn.Module, name: str, device: Device, value: Any = None) -> None:
        tied = self.tied_params_map
        place_tensor(module, name, device, value=value, tied_params_map=tied)

    def weight(self, name: str) -> torch.Tensor:
        """Return the offloaded weight of a name in the module."""
        if self.weights_map is None:
            raise StateError(f"weight {name!r}: the hook was not attached to a module yet.")
        resident = self.resident(name)
        return self.weights_map[name] if resident is None else resident.detach()

    def resident(self, name: str) -> nn.Parameter | None:
        """Return what an offloaded weight is tied to, if a module keeps that where it runs.

        Args:
            name: of the weight, in the module.
        """
        device = as_device("cpu" if self.execution_device is None else self.execution_device)
        tied = self.ties.present(self.tied.get(name, ()))
        return next((one for one in tied if check_device_same(one.device, device)), None)

    def present(self, name: str, place: TiedPlace) -> nn.Parameter | None:
        """Return an offloaded weight while it has values: loaded, or given back.

        Args:
            name: of the weight, in the module.
            place: where the weight is.
        """
        loaded = place[0]._parameters.get(place[1])
        return loaded if self._users > 0 else self.restored.get(name)

    def write(self, module: nn.Module, name: str, value: torch.Tensor) -> bool:
        """Keep another value of an offloaded tensor in the weights map; false if it is not one.

        Args:
            module: what the hook is attached to.
            name: of the tensor, in the module.
            value: of the tensor, on any device.

        Raises:
            StateError: if other modules are tied to the tensor, or the mapping is read-only.
        """
        first = next((one for one, known in self.aliases.items() if name in known), name)
        if not self.offload or first not in self.offloaded(module):
            return False
        with self.lock:
            self._write(first, value)
        return True

    def has_value(self, module: nn.Module, name: str) -> bool:
        """Return whether a tensor on the meta device is offloaded, or is to stay there.

        Args:
            module: what the hook is attached to.
            name: of the tensor, in the module.
        """
        device = self.execution_device
        if device is not None and as_device(device).type == "meta":
            return True
        return self.offload and name in self.offloaded(module)

    def _write(self, name: str, value: torch.Tensor) -> None:
        write_weight(self.weights_map, name, value, tied=name in self.tied)
        if self.read_ahead is not None:
            self.read_ahead[0].forget(self.read_ahead[1])

    # -- the callbacks ---------------------------------------------------------------------

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights of a module, or offload them.

        Args:
            module: what the hook is attached to.
        """
        self.original_devices = {name: tensor.device for name, tensor in self._all(module)}
        self.restored = {}
        device = self.execution_device
        leaving = self.offloaded(module) if self.offload else []
        self.aliases = other_names(module, leaving, self.place_submodules)
        if self.offload and self.weights_map is None:
            held = dict(self._all(module))
            self.weights_map = {name: held[name].detach().to("cpu") for name in leaving}
        for name, tensor in list(self._all(module)):
            if device is not None and name not in leaving and not tensor.is_meta:
                self._place(module, name, device)
        self._to_meta(module, leaving)
        if self.offload:
            self._on_load = module.register_load_state_dict_pre_hook(LoadStateDict(self))
        return module

    @torch.inference_mode(False)
    def _to_meta(self, module: nn.Module, names: Iterable[str]) -> None:
        for name in names:
            held, key = held_in(module, name)
            left, trains = self._left.get(name), held[key].requires_grad
            if left is not None and are_alike(left, held[key]):
                held[key] = marked_offloaded(left)
            else:
                place_tensor(module, name, "meta", clear_cache=False)
                self._left[name] = held[key] = marked_offloaded(held[key])
            if left is not None and left.requires_grad != trains:
                torch.Tensor.requires_grad_(held[key], trains)
        self._tie(module)

    def _tie(self, module: nn.Module) -> None:
        """Give each weight under its other names in the module, too: it is loaded once."""
        for name, others in self.aliases.items():
            held, key = held_in(module, name)
            for owner, alias in (held_in(module, other) for other in others):
                owner[alias] = held[key]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Load offloaded weights, and move the arguments to the device of the forward pass.

        Args:
            module: what the hook is attached to.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if self.io_same_device:
            first = next(iterate([args, kwargs]), None)
            self.input_device = None if first is None else first.device
        if (args or kwargs) and not torch.compiler.is_compiling():
            self._check(module, (args, kwargs))
        if self.execution_device is not None:
            target = as_device(self.execution_device)
            args = send_to_device(args, target)
            kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
        if self.offload:
            self._load(module)
            # Who calls this by hand, as peft does to merge adapters, may write to the `data` of a
            # weight, of which its contents alone tell.
            self._by_hand = self._by_hand or not (args or kwargs)
        return args, kwargs

    def _check(self, module: nn.Module, inputs: object) -> None:
        if self.io_same_device and not getattr(next(iterate(inputs), None), "is_meta", False):
            check_hooked(module)

    @outside_graphs
    def _load(self, module: nn.Module) -> None:
        # Tensors that are made in inference mode have no version, which tells of changes.
        with self.lock, torch.inference_mode(False):
            names = self.offloaded(module)
            if self._users == 0:
                refuse_assigned(module, self.assigned(module, names))
                try:
                    self._load_values(module, names)
                except BaseException:
                    self._to_meta(module, names)
                    raise
            self._users += 1

    def assigned(self, module: nn.Module, names: Iterable[str]) -> Iterator[str]:
        """Yield the names of offloaded tensors that something else was put in the place of.

        Args:
            module: what the hook is attached to, while it does not run.
            names: of offloaded tensors, in the module.
        """
        for name in names:
            held, key = held_in(module, name)
            tied = [owner._parameters[other] for owner, other in self.tied.get(name, ())]
            own = [self._left.get(name), *(one for one in tied if one is not held[key])]
            for one in self.all_names(name):
                tensor = get_tensor(module, one)
                if tensor is None or any(tensor is known for known in own):
                    continue
                if isinstance(tensor, nn.Parameter) or not tensor.is_meta:  # else of another dtype
                    yield one

    def _load_values(self, module: nn.Module, names: Iterable[str]) -> None:
        ready = self._read_ahead()
        device = "cpu" if self.execution_device is None else self.execution_device
        self._loaded = {}
        for name in names:
            resident = self.resident(name)
            if resident is not None:  # it is no copy: it may be changed, and train
                held, key = held_in(module, name)
                held[key] = resident
                continue
            value = ready[name] if name in ready else self.weight(name)
            # One that was made in inference mode could not train, nor count its changes.
            self._place(module, name, device, value.clone() if value.is_inference() else value)
            held, key = held_in(module, name)
            self._loaded[name] = LoadedWeight(held[key])
            if held[key].requires_grad:
                held[key].register_hook(refuse_gradient)
        self._tie(module)

    def _read_ahead(self) -> dict[str, torch.Tensor]:
        if self.read_ahead is None or self.weights_map is None:
            return {}
        ahead, number = self.read_ahead
        ahead.read_from(number, self.weights_map)
        return ahead.take(number)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Offload the weights again, and move the output to the device of the inputs.

        Args:
            module: what the hook is attached to.
            output: what `forward` returned.
        """
        if self.offload:
            self._unload(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        """Offload the weights again.

        Args:
            module: what the hook is attached to.
        """
        if self.offload:
            self._unload(module)

    @outside_graphs
    def _unload(self, module: nn.Module) -> None:
        with self.lock:
            if self.read_ahead is not None:
                self.read_ahead[0].release()
            users, self._users = self._users, max(self._users - 1, 0)
            if users != 1:  # others use the weights, or the hook was removed within
                return
            names = self.offloaded(module)
            try:
                self._keep_changes(module, self._loaded.keys())
            finally:
                self._loaded, self._by_hand = {}, False
                self._forget_copies(module, names)
                self._to_meta(module, names)

    def _keep_changes(self, module: nn.Module, names: Collection[str]) -> None:
        weights = self.weights_map
        if weights is None:
            return
        for name in names:
            loaded, (held, key) = self._loaded[name], held_in(module, name)
            if loaded.changed(held[key], weights, name, by_contents=self._by_hand):
                self._write(name, held[key])

    def _forget_copies(self, module: nn.Module, names: Iterable[str]) -> None:
        """Drop the copies of tied weights that this forward pass made."""
        loaded = {id(held[key]) for held, key in (held_in(module, name) for name in names)}
        for copies in (self.tied_params_map or {}).values():
            for device in [d for d, copy in copies.items() if id(copy) in loaded]:
                del copies[device]

    def before_detach(self, module: nn.Module) -> None:
        """Refuse to be removed where another offloaded weight was assigned to one.

        Args:
            module: what the hook is attached to.
        """
        if self.offload:
            self.values_assigned(module, self.offloaded(module))
            self._keep_loaded(module)

    def _keep_loaded(self, module: nn.Module) -> None:
        """Keep what was changed of weights that are loaded by hand; tied ones are given back so."""
        with self.lock:
            if self._users > 0:
                self._keep_changes(module, self._loaded.keys() - self.tied.keys())

    @torch.inference_mode(False)
    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give a module the weights back that it had in memory, or that were changed since.

        Args:
            module: what the hook was attached to.
        """
        names = self.offloaded(module) if self.offload else []
        given = self.values_assigned(module, names)  # refused before anything changes
        self._keep_loaded(module)
        if self._on_load is not None:
            self._on_load.remove()
        if self.weights_map is not None:
            for name in names:
                self._restore_all(module, name, given)
        self._users, self._by_hand, self._loaded = 0, False, {}
        return module

    def _restore_all(self, module: nn.Module, name: str, given: Collection[str]) -> None:
        """Give a module a weight back under all its names, but for those that were given values."""
        assert self.weights_map is not None
        first: torch.Tensor | None = None
        for one in self.all_names(name):
            if one in given:
                continue
            held, key = held_in(module, one)
            if first is None:
                self._restore(module, one, name, self.weights_map)
                first = held[key]
            held[key] = first
            self.restored[one] = first

    def values_assigned(self, module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the values that were assigned to offloaded tensors, by name.

        Args:
            module: what the hook is attached to, while it does not run.
            names: of offloaded tensors, in the module.

        Raises:
            StateError: for another offloaded weight in the place of one, which has no values.
        """
        if self._users > 0:
            return {}
        held = {name: get_tensor(module, name) for name in self.assigned(module, names)}
        given = {name: one for name, one in held.items() if one is not None and not one.is_meta}
        refuse_assigned(module, held.keys() - given.keys())
        return given

    def _restore(self, module: nn.Module, name: str, source: str, weights: Weights) -> None:
        """Give a module a weight back, the same one as other modules that it is tied to have.

        One on disk is mapped from its file, so that it takes no memory before it is used.
        """
        tied = self.tied.get(source, ())
        present = next(self.ties.present(tied), None)
        device = self.original_devices.get(source, torch.device("cpu"))
        held, key = held_in(module, name)
        if present is not None:
            held[key] = present
            return
        try:
            value = weights[source]
            value = value.clone() if value.is_inference() else value
            self._place(module, name, "cpu" if device.type == "meta" else device, value)
        except CheckpointError as error:
            logger.warning(
                "%s of %s is left without values: %s", name, type(module).__name__, error
            )
