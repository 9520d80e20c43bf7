"""Memory of the devices that a model may be spread over."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import nn

from accel.logging import get_logger
from accel.machine.device import default_device_type, device_count
from accel.machine.errors import ConfigError
from accel.weights.sizes import (
    Dtype,
    compute_module_sizes,
    convert_file_size_to_int,
    get_module_leaves,
    layers_of,
    own_parts,
)

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
    if default_device_type() == "mps":
        return {"mps": _free_memory()}
    return {n: torch.accelerator.get_memory_info(n)[0] for n in _accelerators()}


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
