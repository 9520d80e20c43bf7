"""Build a model without memory for its weights, or right on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.machine import env
from accel.weights.tensors import Device, as_device, like

_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of modules that are built within on the meta device, without memory.

    A model built so cannot compute before weights are loaded into it.

    Args:
        include_buffers: whether buffers go there, too, and other tensors made within; None: as
            the variable ACCELERATE_INIT_INCLUDE_BUFFERS says.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of modules that are built within on a device.

    Args:
        device: where to.
        include_buffers: whether buffers go there, too, and other tensors made within; None: as
            the variable ACCELERATE_INIT_INCLUDE_BUFFERS says.
    """
    target = as_device(device)
    buffers = env.flag(_VARIABLE) if include_buffers is None else include_buffers
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        present = module._parameters[name]
        if present is not None and present.device != target:
            moved = like(present, present.to(target))
            module._parameters[name] = moved  # type: ignore[assignment] # of the class it has

    def buffer_on_device(module: nn.Module, name: str, tensor: Any, *args: Any, **kw: Any) -> None:
        register_buffer(module, name, tensor, *args, **kw)
        if tensor is not None:
            module._buffers[name] = tensor.to(target)

    try:
        nn.Module.register_parameter = on_device  # type: ignore[assignment, method-assign]
        if not buffers:
            yield
            return
        nn.Module.register_buffer = buffer_on_device  # type: ignore[assignment, method-assign]
        with target:
            yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
