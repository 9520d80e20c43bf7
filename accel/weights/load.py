"""Load a checkpoint into a model, in memory or over devices, one file after the other."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accel.checkpoint.serialization import load_plain, read_tensors
from accel.comm.base import together
from accel.logging import get_logger
from accel.machine.device import default_device_type, device_count
from accel.machine.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    Problems,
    listed,
    unknown_choice,
)
from accel.precision.wrapping import own_module
from accel.state import PartialState
from accel.weights import files
from accel.weights.attach_hooks import Keys
from accel.weights.device_map import (
    DeviceMap,
    MaxMemory,
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
    lies_within,
    unknown_modules,
)
from accel.weights.dispatch import PathLike, dispatch_model, undo
from accel.weights.files import Shapes
from accel.weights.offloaded_tensors import HELD, STORED_AS
from accel.weights.sizes import Dtype
from accel.weights.tensors import (
    as_device,
    as_dtype,
    device_of,
    held_in,
    like,
    name_of,
    names_by_tensor,
    retie_parameters,
)

if TYPE_CHECKING:
    from accel.weights.folder import DiskWeights


logger = get_logger(__name__)

AnyDevice = int | str | torch.device
DISK = torch.device("meta")  # of a weight that stays on disk: the model holds its shape alone
_CPU = torch.device("cpu")
_CODES = (torch.int8, torch.uint8)


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, AnyDevice] | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, never holding more than one file of them besides the model.

    Names and shapes are compared before anything is loaded, so that a checkpoint that does not fit
    leaves the model as it was. Parameters on the meta device are given memory; others keep their
    identity (optimizers keep referring to them), and tied weights stay tied. Pickles are read
    without running code.

    Args:
        model: prepared or not.
        checkpoint: a file of weights (``.safetensors``, or what `torch.save` wrote), an index of
            shards (``….index.json``), or a folder that holds one of these.
        device_map: device by name of a submodule or weight; the longest name that fits holds, ""
            fits all. None: weights stay where the model has them, those on meta go to the CPU.
            Over several devices, the model still has to be dispatched before it can run; an earlier
            dispatch is undone.
        offload_folder: where weights mapped to "disk" are listed, and written unless they lie in
            safetensors files in the dtype that they are wanted in: such files are read in place.
        dtype: what floating weights become, e.g. "bfloat16"; None: as the model has them.
        offload_state_dict: whether files of `torch.save` are mapped into memory (safetensors are).
        offload_buffers: whether buffers are offloaded with the weights; else they go to the CPU.
        keep_in_fp32_modules: submodules, by full name or one part of it, that stay in fp32.
        offload_8bit_bnb: whether 8-bit modules are offloaded; refused.
        strict: whether missing and unexpected names are an error, else one warning unless no name
            fits.
        full_state_dict: whether weights are full tensors; sharded ones are not built yet.
        broadcast_from_rank0: whether only rank 0 reads and sends the weights; every rank calls.

    Raises:
        CheckpointError: naming every wrong shape (and with `strict` every missing and unexpected
            name), a checkpoint without a weight of the model or with integers for floating ones, or
            the problems of the files.
        ConfigError: for devices and names that do not exist, for `offload_8bit_bnb`, and without a
            `device_map` for a model whose weights are offloaded.

    Example:
        >>> accelerator.save_model(model, "export", max_shard_size="1GB")
        >>> load_checkpoint_in_model(fresh, "export", strict=True)
    """
    _refuse(device_map, offload_folder, offload_8bit_bnb, full_state_dict)
    target = own_module(model)
    source = _source(checkpoint, offload_state_dict, broadcast_from_rank0)
    shapes = source.shapes()
    if device_map is not None:
        check_device_map(target, device_map)
        undo(target)
    elif any(isinstance(one, HELD) for one in (*target.parameters(), *target.buffers())):
        rule, remedy = "its weights are offloaded", "Give a device_map: the dispatch is undone."
        raise ConfigError.of("load_checkpoint_in_model of a dispatched model", rule, remedy)
    plan = _Plan(target, device_map, dtype, keep_in_fp32_modules or (), offload_buffers)
    _compare(fspath(checkpoint), plan, shapes, strict)
    if offload_folder is not None and plan.on_disk():
        from accel.weights.folder import DiskWeights

        plan.disk = DiskWeights(offload_folder, source.stored())
    plan.move(shapes)
    for part in source.parts():
        plan.load(part)
    plan.tie()


def _refuse(device_map: Any, folder: object, eight_bit: bool, full: bool) -> None:
    problems = Problems()
    if isinstance(device_map, str):
        rule = "devices are given by submodule"
        remedy = 'Pass {"": "cpu"}, or call `load_checkpoint_and_dispatch`.'
        problems.add(f"device_map={device_map!r}", rule, remedy)
    elif folder is None and "disk" in (device_map or {}).values():
        rule = "at least one of the model submodule will be offloaded to disk"
        remedy = "please pass along an `offload_folder`."
        problems.add("offload_folder=None", rule, remedy)
    if eight_bit:
        rule = "8-bit layers stay on their device: their scales have no place in the offload folder"
        remedy = "Leave it out, and offload other modules, or quantize to 4 bits: those that "
        remedy += "load_and_quantize_model offloads are kept in torch_dtype."
        problems.add("offload_8bit_bnb=True", rule, remedy)
    if not full:
        remedy = "Save full, not sharded, weights with `save_model`."
        problems.add_not_built("full_state_dict=False", remedy)
    problems.raise_if()


def _source(checkpoint: Any, mmap: bool, broadcast: bool) -> files.Source | files.Broadcast:
    if not broadcast:
        return files.find(checkpoint, mmap)
    state = PartialState()
    with together(state.comm, "reading the weights"):
        found = files.find(checkpoint, mmap) if state.comm.rank == 0 else None
    return files.Broadcast(found, state.comm, state.device)


# -- what goes where -----------------------------------------------------------------------


class _Plan:
    """Device and dtype of each weight of a model, and how it gets there."""

    def __init__(
        self,
        model: torch.nn.Module,
        device_map: Mapping[str, AnyDevice] | None,
        dtype: str | torch.dtype | None,
        keep_in_fp32: Sequence[str],
        offload_buffers: bool,
    ) -> None:
        from accel.weights.state import QuantizedParts

        self.model = model
        self.disk: DiskWeights | None = None
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._stay = set() if offload_buffers else self._buffers
        self.state: dict[str, Any] = model.state_dict(keep_vars=True)
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self.ties = [group for group in names_by_tensor(named) if len(group) > 1]
        self.quantized = QuantizedParts(model)
        problems = Problems()
        self._dtype = _known(dtype, problems)
        self._devices = {
            name: _as_device(name, device, problems) for name, device in (device_map or {}).items()
        }
        problems += unknown_modules(model, "keep_in_fp32_modules", keep_in_fp32)
        problems.raise_if()
        kept = {name for name in self.state if lies_within(name, keep_in_fp32)}
        self._in_fp32 = kept.union(*(one for one in self.ties if not kept.isdisjoint(one)))

    def _mapped(self, name: str) -> torch.device | None:
        """Return the device that the map gives a weight; None without a map."""
        found = as_device(device_of(name, self._devices)) if self._devices else None
        return _CPU if found == DISK and name in self._stay else found

    def on_disk(self) -> list[str]:
        """Return the names of the weights that stay on disk."""
        return [name for name in self.state if self._mapped(name) == DISK]

    def _place(self, name: str) -> tuple[torch.device, torch.dtype]:
        present = self.state[name]
        stays = torch.device("cpu") if present.is_meta else present.device
        dtype = present.dtype
        if self._dtype is not None and dtype.is_floating_point:
            dtype = torch.float32 if name in self._in_fp32 else self._dtype
        return self._mapped(name) or stays, dtype

    # -- loading ---------------------------------------------------------------------------

    def move(self, names: Iterable[str]) -> None:
        """Bring the weights that the model has in memory to their device and dtype."""
        self._convert_on_disk()
        on_disk: dict[int, torch.Tensor] = {}
        for name in self.with_ties(names):
            present = None if name in self.quantized.awaited else self.state.get(name)
            if isinstance(present, torch.Tensor) and not present.is_meta and not is_lazy(present):
                device, dtype = self._place(name)
                if device == DISK:
                    held, key = held_in(self.model, name)
                    shape = like(present, present.detach().to(DISK, dtype))
                    held[key] = on_disk.setdefault(id(present), shape)  # still tied
                else:
                    present.data = present.data.to(device, dtype)

    def with_ties(self, names: Iterable[str]) -> list[str]:
        """Return names of weights, after the other names of those that are tied."""
        wanted = dict.fromkeys(names)
        groups = (group for group in self.ties if any(name in wanted for name in group))
        others = [name for group in groups for name in group if name not in wanted]
        return [*others, *wanted]

    def _convert_on_disk(self) -> None:
        """Give what stays on disk its dtype, in which it is loaded for a forward pass."""
        converted: dict[int, torch.Tensor] = {}
        for name in self.on_disk():
            held, key = held_in(self.model, name)
            old, dtype = held[key], self._place(name)[1]
            if old.is_meta and old.dtype != dtype:
                shape = torch.empty_like(old, dtype=dtype)
                held[key] = converted.setdefault(id(old), like(old, shape))

    def load(self, part: Mapping[str, Any]) -> None:
        """Load some of the weights."""
        part = self.quantized.load(part)
        self._check_codes(part)
        part = self._offload(part)
        fresh = {
            # A copy: what was read may be a view of the file.
            name: value.to(*self._place(name), copy=True)
            for name, value in part.items()
            if isinstance(value, torch.Tensor) and self._is_empty(name)
        }
        rest = {name: value for name, value in part.items() if name not in fresh}
        if fresh:
            self.model.load_state_dict(self._versioned(fresh), strict=False, assign=True)
        if rest:
            self.model.load_state_dict(self._versioned(rest), strict=False)

    def _is_empty(self, name: str) -> bool:
        """Return whether the model has no value of a weight."""
        return getattr(self.state.get(name), "is_meta", False)

    def _check_codes(self, part: Mapping[str, Any]) -> None:
        """Refuse integers for floating weights: they are codes of quantized ones."""
        codes = [
            f"{name} ({name_of(value.dtype)})"
            for name, value in part.items()
            if isinstance(value, torch.Tensor)
            and value.dtype in _CODES
            and name in self.state
            and self.state[name].is_floating_point()
        ]
        if codes:
            rule = "they are codes of quantized weights, and the model has floating ones"
            remedy = "Load them with load_and_quantize_model, or save the model before quantizing."
            raise CheckpointError(Problem(f"weights {listed(codes)}", rule, remedy))

    def _versioned(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return weights as of this version of their modules: none fills in what is on disk."""
        if self.disk is None:
            return part
        versioned = OrderedDict(part)
        present: Any = self.state
        # Copies: torch notes in them that weights are assigned, and would assign later ones, too.
        versions = {name: dict(own) for name, own in present._metadata.items()}
        versioned._metadata = versions  # type: ignore[attr-defined] # torch's own
        return versioned

    def _offload(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Offload those of some weights that stay on disk; return the others."""
        if self.disk is None:
            return part
        on_disk = set(self.on_disk())
        stored = {name: name for name in part} | dict(self._tied(part, on_disk))
        for name in stored.keys() & on_disk:
            self.disk.add(name, part[stored[name]], self._place(name)[1], stored[name])
        return {name: part[key] for name, key in stored.items() if name not in on_disk}

    def _tied(self, part: Mapping[str, Any], on_disk: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the other names of tied weights, of which one is on disk, and that in `part`."""
        for group in self.ties:
            known = next((name for name in group if name in part), None)
            for name in group if known is not None and not on_disk.isdisjoint(group) else ():
                if name not in part:
                    yield name, str(known)

    def tie(self) -> None:
        """Restore the weights that were tied on the meta device to one tensor.

        Of one that is to be on disk and in memory, the tensor in memory is the weight: dispatch
        offloads it where it is to be on disk.
        """
        self.quantized.finish()
        retie_parameters(self.model, self.ties)
        if self.disk is not None:
            self.disk.save(self.on_disk())
            for name in self.disk.index:
                held, key = held_in(self.model, name)
                held[key].__dict__.setdefault(STORED_AS, set()).add(name)


def _known(dtype: str | torch.dtype | None, problems: Problems) -> torch.dtype | None:
    return None if dtype is None else problems.collect(as_dtype, dtype)


def _as_device(name: str, device: AnyDevice, problems: Problems) -> torch.device:
    if device == "disk":
        return DISK
    kind = f"{default_device_type()}:{device}" if isinstance(device, int) else str(device)
    value = f"device_map[{name!r}]={device!r}"
    try:
        found = torch.device(kind)
        count = 1 if found.type in ("cpu", "meta") else device_count(found.type)
    except (RuntimeError, ConfigError) as error:
        problems.add(value, f"it is no device ({str(error).splitlines()[0]})", _DEVICES)
        return torch.device("cpu")
    if isinstance(device, int) and found.type == "cpu":
        problems.add(value, "this machine has no accelerator", _DEVICES)
    elif (found.index or 0) >= count:
        problems.add(value, f"this machine has {count} {found.type} devices", _DEVICES)
    elif found.type == "meta":
        problems.add(value, "weights on meta have no memory", _DEVICES)
    return found


_DEVICES = 'Give "cpu", or an accelerator of this machine by number or as "cuda:0".'


# -- what does not fit ---------------------------------------------------------------------


def _compare(checkpoint: str, plan: _Plan, shapes: Shapes, strict: bool) -> None:
    """Report everything in which the checkpoint does not fit the model, in one message."""
    state = plan.state
    tied = {name: set(group) for group in plan.ties for name in group}
    missing = [n for n in state if n not in shapes and tied.get(n, set()).isdisjoint(shapes)]
    unexpected = [name for name in shapes if name not in state]
    wrong = [
        f"{name} is {list(shape)}, in the model {list(state[name].shape)}"
        for name, shape in shapes.items()
        if shape is not None
        and _has_shape(state.get(name))
        and state[name].shape != shape
        and name not in plan.quantized.packed
    ]
    differences = [
        f"{what}: {listed(found)}"
        for what, found in (
            ("wrong shapes", wrong),
            ("missing from the checkpoint", missing),
            ("not in the model", unexpected),
        )
        if found
    ]
    nothing = bool(unexpected) and len(unexpected) == len(shapes)
    if wrong or nothing or (strict and differences):
        remedy = "Build the model as it was when it was saved"
        also = ", or pass strict=False." if not (wrong or nothing) else "."
        value = f"checkpoint {checkpoint!r}"
        rule = f"its weights do not fit {type(plan.model).__name__}; {'; '.join(differences)}"
        raise CheckpointError(Problem(value, rule, remedy + also))
    if differences:
        found = "; ".join(differences)
        warnings.warn(f"load_checkpoint_in_model({checkpoint!r}): {found}.", stacklevel=3)


def _has_shape(present: Any) -> bool:
    return isinstance(present, torch.Tensor) and not is_lazy(present)


_CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_state_dict(
    checkpoint_file: PathLike, device_map: DeviceMap | None = None
) -> dict[str, torch.Tensor]:
    """Read one file of weights.

    Args:
        checkpoint_file: safetensors, or what `torch.save` wrote (read without running code).
        device_map: device by full name of a submodule, for safetensors; "disk" and None: the CPU.

    Returns:
        Tensors by name; those of safetensors on the CPU are mapped from the file.

    Raises:
        CheckpointError: if the file is missing, incomplete or would run code.
    """
    path = Path(checkpoint_file)
    if path.suffix != ".safetensors":
        return dict(load_plain(path))
    tensors = read_tensors(path)
    if not device_map:
        return tensors
    everywhere = {"": "cpu", **device_map}
    return {
        name: tensor.to(_device(device_of(name, everywhere))) for name, tensor in tensors.items()
    }


def _device(device: torch.device | str | int) -> torch.device:
    return torch.device("cpu") if device == "disk" else as_device(device)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap | str | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, spread it over devices and hook it to run there.

    Args:
        model: on the meta device, or with data.
        checkpoint: as of `load_checkpoint_in_model`.
        device_map: as of `dispatch_model`; "auto" and "balanced": even parts for the
            accelerators, "balanced_low_0": little for the first, "sequential": one after the other
            is filled. An earlier dispatch is undone. None: weights stay where the model has them.
        max_memory: bytes, or texts such as "1GB", by device; None: what is free.
        no_split_module_classes: names of classes whose instances go to one device as a whole.
        offload_folder: where weights on "disk" are listed or written.
        offload_buffers: whether buffers are offloaded with the weights.
        dtype: what floating weights become, e.g. "bfloat16"; None: as the model has them.
        offload_state_dict: whether files of `torch.save` are mapped into memory; None: if weights
            go to the disk.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: as of `cpu_offload`.
        force_hooks: whether there are hooks also where one device has all.
        strict: whether missing and unexpected names are an error.
        full_state_dict: as of `load_checkpoint_in_model`.
        broadcast_from_rank0: whether only rank 0 reads and sends the weights; every rank calls.

    Returns:
        The model.

    Raises:
        ConfigError: for a `device_map` that is no such word.

    Example:
        >>> with init_empty_weights():
        ...     model = Model(config)
        >>> model = load_checkpoint_and_dispatch(model, "weights", device_map="auto")
    """
    if isinstance(device_map, str):
        device_map = inferred_device_map(
            device_map,
            model,
            max_memory,
            no_split_module_classes,
            dtype,
            offload_buffers=offload_buffers,
        )
    if offload_state_dict is None:
        offload_state_dict = device_map is not None and "disk" in device_map.values()
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=offload_state_dict,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def inferred_device_map(
    word: str,
    model: nn.Module,
    max_memory: MaxMemory | None,
    no_split: Collection[str] | None,
    dtype: Dtype | None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
) -> DeviceMap:
    """Return the device map that a word stands for: "auto", "balanced", …; else `ConfigError`."""
    if word not in _CHOICES:
        raise ConfigError(unknown_choice("device_map", word, _CHOICES))
    if word != "sequential":
        low_zero = word == "balanced_low_0"
        max_memory = get_balanced_memory(
            model, max_memory, no_split, dtype, special_dtypes, low_zero=low_zero
        )
    return infer_auto_device_map(
        model, max_memory, no_split, dtype, special_dtypes, offload_buffers=offload_buffers
    )
