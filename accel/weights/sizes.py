"""Bytes of the modules of a model, also of one on the meta device."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from accel.machine.enums import CustomDtype
from accel.machine.errors import ConfigError
from accel.weights.tensors import as_dtype, named_module_tensors

Dtype = str | torch.dtype | CustomDtype
# A submodule, or a parameter or buffer of the model's own.
Part = nn.Module | torch.Tensor
_CUSTOM = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_PACKED = re.compile(r"torch\.u?int([1-7])")  # bits of dtypes that are smaller than a byte
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT])(I?)(B)\s*", re.IGNORECASE)


def convert_file_size_to_int(size: float | str) -> int:
    """Return a size in bytes.

    Args:
        size: bytes, or a text such as "5GB" (10^9), "5GiB" (2^30) or "5Gb" (bits).

    Raises:
        ConfigError: for a text of another form.
    """
    if not isinstance(size, str):
        return int(size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError.of(
            f"size={size!r}",
            "`size` is not in a valid format",
            "Use an integer for bytes, or a string with an unit (like '5.0GB').",
        )
    number, unit, binary, byte = match.groups()
    base = 1024 if binary else 1000
    total = float(number) * base ** _UNITS[unit.upper()]
    return int(total if byte == "B" else total // 8)


def convert_bytes(size: float) -> str:
    """Return a size in the largest unit that it reaches: "1.18 MB" of 1,234,567 bytes.

    Args:
        size: in bytes.
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> int | float:
    """Return the bytes of one element.

    Args:
        dtype: of torch, or a packed one.

    Returns:
        A fraction for dtypes that several elements of share a byte.
    """
    if isinstance(dtype, CustomDtype):
        size = _CUSTOM[dtype]
        return int(size) if size >= 1 else size
    packed = _PACKED.fullmatch(str(dtype))
    if packed is not None:  # torch has no memory layout for them yet, and says one byte
        return int(packed[1]) / 8
    return 0.125 if dtype == torch.bool else dtype.itemsize


def _bytes_of(dtype: Dtype) -> int | float:
    if isinstance(dtype, CustomDtype):
        return dtype_byte_size(dtype)
    return dtype_byte_size(as_dtype(dtype))


def tensor_bytes(
    name: str,
    tensor: torch.Tensor,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> int:
    """Return the bytes of a tensor once it is in its dtype: it never grows by `dtype`."""
    size: int | float = tensor.element_size()
    if special_dtypes and name in special_dtypes:
        size = _bytes_of(special_dtypes[name])
    elif dtype is not None and tensor.is_floating_point():  # loading leaves complex ones
        size = min(_bytes_of(dtype), size)
    return math.ceil(tensor.numel() * size)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each submodule, parameter and buffer by full name; "" is the model.

    Args:
        model: on any device, also meta.
        dtype: that floating tensors are going to have, unless theirs is smaller; None: theirs.
            Complex tensors and integers keep theirs, as when a checkpoint is loaded.
        special_dtypes: dtype by full name of a tensor, where it is another.
        buffers_only: whether buffers alone count.
    """
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = tensor_bytes(name, tensor, dtype, special_dtypes)
        parts = name.split(".")
        for end in range(len(parts) + 1):
            sizes[".".join(parts[:end])] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> int:
    """Return the bytes of all buffers of a model.

    Args:
        model: on any device, also meta.
        dtype: as of `compute_module_sizes`.
        special_dtypes: as of `compute_module_sizes`.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names in a table of sizes that no other name lies in.

    Args:
        module_sizes: bytes by full name, as of `compute_module_sizes`.
    """
    parents = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in parents]


# -- layers --------------------------------------------------------------------------------


def own_parts(module: nn.Module, prefix: str = "") -> list[tuple[str, Part]]:
    """Return the parameters, submodules and buffers that are a module's own, by full name."""
    start = f"{prefix}." if prefix else ""
    parts: list[tuple[str, Part]] = [
        *module.named_parameters(recurse=False),
        *module.named_children(),
        *module.named_buffers(recurse=False),
    ]
    return [(f"{start}{name}", part) for name, part in parts]


def is_layer(part: Part, no_split: Collection[str]) -> bool:
    """Return whether a part goes to one device as a whole."""
    if isinstance(part, torch.Tensor):
        return True
    return type(part).__name__ in no_split or next(part.children(), None) is None


def layers_of(
    parts: Sequence[tuple[str, Part]], no_split: Collection[str]
) -> Iterator[tuple[str, Part]]:
    """Yield the layers of some parts of a model, by full name."""
    for name, part in parts:
        if is_layer(part, no_split):
            yield name, part
        elif isinstance(part, nn.Module):
            yield from layers_of(own_parts(part, name), no_split)


def get_max_layer_size(
    modules: Sequence[tuple[str, Part]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Return the bytes and the names of the largest layer: what goes to one device as a whole.

    Args:
        modules: submodules, parameters and buffers by full name.
        module_sizes: bytes by full name, as of `compute_module_sizes`.
        no_split_module_classes: names of classes whose instances are layers; other layers are the
            modules without submodules.
    """
    largest, names = 0, list[str]()
    for name, _ in layers_of(modules, no_split_module_classes):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and those of its largest layer with its names.

    Args:
        model: on any device, also meta; layers of a model of transformers are its blocks.
    """
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or ()
    return sizes.get("", 0), get_max_layer_size(own_parts(model), sizes, no_split)
