"""Device maps: which device each submodule of a model goes to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping

from torch import nn

from accel.logging import get_logger
from accel.machine.errors import ConfigError
from accel.weights.device_memory import MaxMemory, as_classes, get_max_memory
from accel.weights.fill_devices import Filler, lies_in
from accel.weights.sizes import Dtype, compute_module_sizes, own_parts
from accel.weights.tensors import Device, find_tied_parameters

logger = get_logger(__name__)

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
        logger.warning(
            "The following device_map keys do not match any submodules in the model: %s", unknown
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
