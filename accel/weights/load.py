"""Load a checkpoint into a model that is larger than the memory of a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from accel.checkpoint.serialization import load_plain, read_tensors
from accel.machine.errors import ConfigError, unknown_choice
from accel.weights.attach import Keys
from accel.weights.device_map import DeviceMap, infer_auto_device_map
from accel.weights.device_memory import MaxMemory, get_balanced_memory
from accel.weights.dispatch import PathLike, dispatch_model
from accel.weights.load_weights import load_checkpoint_in_model
from accel.weights.sizes import Dtype
from accel.weights.tensors import as_device, device_of

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
