"""Device maps: which device each submodule of a model goes to, by the memory of each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from accel.logging import get_logger
from accel.machine.device import default_device_type, device_count, device_kind
from accel.machine.errors import ConfigError, Problem, nearest
from accel.weights.sizes import (
    Dtype,
    Part,
    compute_module_sizes,
    convert_file_size_to_int,
    get_max_layer_size,
    get_module_leaves,
    is_layer,
    layers_of,
    own_parts,
)
from accel.weights.tensors import Device, find_tied_parameters

logger = get_logger(__name__)

Place = int | str
MaxMemory = Mapping[Place, float | str]
ELSEWHERE = ("cpu", "disk")  # places of a device map that are no accelerators
_BUFFER = 1.25  # of the largest block, that each device may hold beyond its part
# Limits of a container. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
_CGROUP = Path("/sys/fs/cgroup")


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[Place, int]:
    """Return the bytes that may be used of each device, in the order in which they are filled.

    Args:
        max_memory: bytes, or texts such as "1GB", by device: numbers, "mps", "cpu", "disk". Texts
            of a dict become bytes there, too, as transformers counts with them. None: what is free
            on the accelerators of this machine and in its memory.

    Raises:
        ConfigError: for a device that is none of these.
    """
    if max_memory is None:
        return {**_free_on_accelerators(), "cpu": _free_memory()}
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    numbers = sorted(device for device in sizes if isinstance(device, int))
    order: list[Place] = [*numbers, *(d for d in ("mps", "cpu", "disk") if d in sizes)]
    for device in sizes:
        if device not in order:
            raise ConfigError.of(
                f"Device {device} is not recognized",
                "available devices are integers(for GPU/XPU), 'mps', 'cpu' and 'disk'",
                "Give an accelerator by its number.",
            )
    available = _accelerators()
    for number in numbers:
        if number not in available:
            logger.warning(
                "Device %d is not available, available devices are %s", number, available
            )
    if isinstance(max_memory, MutableMapping):
        max_memory.update(
            (d, sizes[d]) for d, given in max_memory.items() if isinstance(given, str)
        )
    return {device: sizes[device] for device in order}


def _accelerators() -> list[int]:
    kind = default_device_type()
    return [] if kind in ("cpu", "mps") else list(range(device_count(kind)))


def _free_on_accelerators() -> dict[Place, int]:
    kind = default_device_type()
    if kind == "mps":
        return {"mps": _free_memory()}
    return {n: device_kind(kind).free_memory(n) for n in _accelerators()}


def _free_memory() -> int:
    """Return the bytes that are free in the machine's memory and under the container's limit."""
    free = _available_memory()
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
    except OSError:  # no container with a limit
        return free
    return min(free, max(0, int(limit) - int(used))) if limit.strip().isdigit() else free


def _available_memory() -> int:
    """Return the bytes that can be had without swapping; Source: man 5 proc_meminfo."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Return bytes of each device with which a model is spread evenly over the accelerators.

    Args:
        model: on any device, also meta.
        max_memory: as of `get_max_memory`; nothing gets more.
        no_split_module_classes: names of classes whose instances go to one device as a whole.
        dtype: as of `compute_module_sizes`.
        special_dtypes: as of `compute_module_sizes`.
        low_zero: whether the first accelerator gets as little as possible, as it has other work
            (such as ``generate`` of transformers).
    """
    limits = get_max_memory(max_memory)
    devices = [d for d in limits if d not in ELSEWHERE and limits[d] > 0]
    if not devices:
        return limits
    if len(devices) == 1:
        low_zero = False
        if max_memory is None:  # room for activations
            limits[devices[0]] = int(limits[devices[0]] * 0.9)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    total = sizes.get("", 0)
    each = total // (len(devices) - 1 if low_zero else len(devices))
    each += int(_BUFFER * _spare(model, sizes, as_classes(no_split_module_classes)))
    for position, device in enumerate(devices[:-1]):
        limits[device] = min(0 if low_zero and position == 0 else each, limits[device])
    if low_zero:
        first, *others = devices
        rest = total - sum(limits[device] for device in others)
        given = get_max_memory(max_memory)[first]
        limits[first] = min(max(0, rest), given)
    return limits


def as_classes(names: Collection[str] | str | None) -> frozenset[str]:
    """Return names of classes, given as one, several or none."""
    return frozenset([names] if isinstance(names, str) else names or ())


def _spare(model: nn.Module, sizes: Mapping[str, int], no_split: frozenset[str]) -> int:
    """Return the bytes by which parts differ: of the largest block, or else a mean layer."""
    blocks = [
        sizes[name]
        for name, part in layers_of(own_parts(model), no_split)
        if type(part).__name__ in no_split
    ]
    tensors = set(get_module_leaves(sizes))
    leaves = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    mean = sum(sizes[name] for name in leaves) // max(1, len(leaves))
    return max([mean, *blocks])


Named = tuple[str, Part]


def lies_in(name: str, module: str) -> bool:
    """Return whether a weight or submodule is the module `module`, or within it."""
    return not module or name == module or name.startswith(f"{module}.")


def lies_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a name is, or lies in, a module that is named fully or by one part."""
    return not {*name.split(".")}.isdisjoint(modules) or any(
        lies_in(name, module) for module in modules if module
    )


def unknown_modules(model: nn.Module, field: str, given: Iterable[str]) -> list[Problem]:
    """Return a problem for each name that is, or is a part of, no name in a model."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    known = {*names, *(part for name in (*names, *model.state_dict()) for part in name.split("."))}
    return [
        Problem(f"{field}: {name!r}", "the model has no such submodule", nearest(name, names))
        for name in given
        if name not in known
    ]


@dataclass
class Filler:
    """Devices, filled in their order.

    Args:
        limits: bytes by device, in the order in which they are filled; the disk has none.
        sizes: bytes by full name of a module or tensor.
        ties: groups of names of tied weights.
        no_split: names of classes whose instances go to one device as a whole.
        fallback: whether a smaller module is tried where the next one does not fit an empty device.
        verbose: whether each decision is logged.
    """

    limits: Mapping[Place, int]
    sizes: Mapping[str, int]
    ties: Sequence[Sequence[str]]
    no_split: frozenset[str]
    fallback: bool = False
    verbose: bool = False
    placed: dict[str, Device] = field(default_factory=dict)
    used: dict[Place, int] = field(default_factory=dict)
    queue: list[Named] = field(default_factory=list)

    def fill(self, parts: Sequence[Named]) -> dict[str, Device]:
        """Return the device of each part, or of the parts that it is split into."""
        self.queue = list(parts)
        devices = [*self.limits, *(["disk"] if "disk" not in self.limits else [])]
        keep_room = self._with_room(devices)
        for device in devices:
            self.used[device] = 0
            while self.queue and self._place_next(device, device in keep_room):
                continue
        return self.placed

    def _with_room(self, devices: Sequence[Place]) -> list[Place]:
        """Return the devices that keep room for a layer that is loaded for its forward pass."""
        accelerators = [device for device in devices if device not in ELSEWHERE]
        if "mps" in accelerators:
            return ["mps"]
        return [accelerators[0], "cpu"] if accelerators else ["cpu"]

    def _room(self, device: Place, keep_room: bool) -> float:
        if device == "disk":
            return float("inf")
        kept = get_max_layer_size(self.queue[1:], self.sizes, self.no_split)[0] if keep_room else 0
        return self.limits[device] - kept - self.used[device]

    def _place_next(self, device: Place, keep_room: bool) -> bool:
        """Place or split the next part; return False if the device has no room for it."""
        name, part = self.queue[0]
        room = self._room(device, keep_room)
        partners = self._tied_to(name)
        size = self._size_with(name, partners)
        if size <= room:
            self._place([self.queue[0], *partners], size, device)
        elif partners and self.sizes.get(name, 0) <= room:
            return self._split_one(partners)
        elif not self._split(name, part):
            return self._fall_back(device, room)
        return True

    def _place(self, parts: Sequence[Named], size: int, device: Place) -> None:
        names = {name for name, _ in parts}
        self.queue = [one for one in self.queue if one[0] not in names]
        self.placed.update(dict.fromkeys((name for name, _ in parts), device))
        self.used[device] += size
        self._tell("Putting %s (size=%d) on %s.", sorted(names), size, device)

    def _tell(self, message: str, *values: object) -> None:
        if self.verbose:
            logger.warning(message, *values)

    # -- splitting -------------------------------------------------------------------------

    def _split(self, name: str, part: Part) -> bool:
        """Replace a part of the queue by its own parts; return False if it is a layer."""
        if is_layer(part, self.no_split) or not isinstance(part, nn.Module):
            return False
        self._tell("Splitting %s.", name)
        at = [known for known, _ in self.queue].index(name)
        self.queue[at : at + 1] = own_parts(part, name)
        return True

    def _split_one(self, parts: Sequence[Named]) -> bool:
        return any(self._split(name, part) for name, part in parts)

    # -- tied weights ----------------------------------------------------------------------

    def _tied_to(self, name: str) -> list[Named]:
        """Return the other parts of the queue that share a weight with the part `name`."""
        shared = [
            other
            for group in self.ties
            if any(lies_in(one, name) for one in group)
            for other in group
            if not lies_in(other, name)
        ]
        return [
            (other, part)
            for other, part in self.queue
            if other != name and any(lies_in(one, other) for one in shared)
        ]

    def _size_with(self, name: str, partners: Sequence[Named]) -> int:
        """Return the bytes of a part and its partners, weights that they share counted once.

        A table of sizes counts a tied weight under its first name only.
        """
        return self.sizes.get(name, 0) + sum(self.sizes.get(other, 0) for other, _ in partners)

    # -- fallback --------------------------------------------------------------------------

    def _fall_back(self, device: Place, room: float) -> bool:
        """Place the first smaller module, level by level, on a device that is still empty."""
        if not self.fallback or self.used[device] > 0:
            return False
        level = list(self.queue)
        while level:
            for name, part in level:
                if self.sizes.get(name, 0) <= room and not self._tied_to(name):
                    self._bring_to_front(name, part)
                    self._place([(name, part)], self.sizes.get(name, 0), device)
                    return True
            level = [
                child
                for name, part in level
                if isinstance(part, nn.Module) and not is_layer(part, self.no_split)
                for child in own_parts(part, name)
            ]
        return False

    def _bring_to_front(self, name: str, part: Part) -> None:
        """Split what a part lies in until it is in the queue itself."""
        while name not in (known for known, _ in self.queue):
            holder = next(one for one in self.queue if lies_in(name, one[0]))
            self._split(*holder)

    # -- buffers ---------------------------------------------------------------------------

    def check_buffers(self, buffer_sizes: Mapping[str, int]) -> None:
        """Warn if the buffers of offloaded modules, which stay, fit no accelerator's free memory.

        `buffer_sizes`: bytes of buffers by full name.
        """
        accelerators = [device for device in self.limits if device not in ELSEWHERE]
        total = sum(
            buffer_sizes.get(name, 0) for name, device in self.placed.items() if device in ELSEWHERE
        )
        free = max((self.limits[one] - self.used[one] for one in accelerators), default=total)
        if total > free:
            warnings.warn(
                f"Current model requires {total} bytes of buffer for offloaded layers, which seems "
                "does not fit any accelerator's remaining memory. If you are experiencing a OOM "
                "later, please consider using offload_buffers=True.",
                stacklevel=3,
            )


DeviceMap = Mapping[str, Device]


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a device map has a device for every weight of a model.

    Args:
        model: the model.
        device_map: device by full name of a submodule or weight; "" is the model.

    Raises:
        ConfigError: naming the weights without a device.
    """
    names = list(model.state_dict())
    buffers = (name for name, _ in model.named_buffers())
    modules = (name for name, _ in model.named_modules(remove_duplicate=False))
    known = {*modules, *names, *buffers}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}",
            stacklevel=3,
        )
    lacking = [n for n in names if not any(lies_in(n, module) for module in device_map)]
    if lacking:
        raise ConfigError.of(
            f"device_map={dict(device_map)!r}",
            "The device_map provided does not give any device for the following parameters: "
            + ", ".join(lacking),
            'Name their submodules, or "" for all others.',
        )


def clean_device_map(
    device_map: MutableMapping[str, Device], module_name: str = ""
) -> MutableMapping[str, Device]:
    """Replace the entries of a device map that share a parent and a device by one of the parent.

    Args:
        device_map: device by full name; changed in place.
        module_name: full name of the submodule whose entries are replaced; "" for all.

    Returns:
        The device map.
    """
    prefix = f"{module_name}." if module_name else ""
    within = [name for name in device_map if name.startswith(prefix)]
    devices = [device_map[name] for name in within]
    if len(devices) > 1 and len(set(devices)) == 1:
        for name in within:
            del device_map[name]
        device_map[module_name] = devices[0]
        return device_map
    depth = prefix.count(".") + 1
    children = dict.fromkeys(
        ".".join(name.split(".")[:depth]) for name in within if name.count(".") >= depth
    )
    for child in children:
        clean_device_map(device_map, child)
    return device_map


# -- what goes where -----------------------------------------------------------------------


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Return a device map that fills accelerators, then the CPU's memory, then the disk.

    Modules go to the devices in the order of their definition. The first accelerator and the CPU
    keep room for the largest layer that comes after, which may have to be loaded there. Tied
    weights go to one device where that has room.

    Args:
        model: on any device, also meta.
        max_memory: bytes, or texts such as "1GB", by device; None: what is free.
        no_split_module_classes: names of classes whose instances go to one device as a whole,
            such as blocks with a residual connection.
        dtype: that floating weights are going to have, unless theirs is smaller; None: theirs.
        special_dtypes: dtype by full name of a weight, where it is another.
        verbose: whether each decision is logged.
        clean_result: whether entries of one parent and device become one.
        offload_buffers: whether buffers are offloaded with the weights; else they need room on the
            accelerator.
        fallback_allocation: whether a smaller module that comes later is tried where the next one
            does not fit a device that is still empty.

    Example:
        >>> infer_auto_device_map(model, {0: "10GB", "cpu": "30GB"}, ["Block"])
        {'embed': 0, 'blocks.0': 0, 'blocks.1': 'cpu', 'head': 'cpu'}
    """
    limits = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    ties = find_tied_parameters(model)
    no_split = as_classes(no_split_module_classes)
    filler = Filler(limits, sizes, ties, no_split, fallback_allocation, verbose)
    devices = filler.fill(own_parts(model))
    if not offload_buffers:
        buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        filler.check_buffers(buffers)
    return dict(clean_device_map(devices)) if clean_result else devices
