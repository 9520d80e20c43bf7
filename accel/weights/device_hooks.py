"""Hooks that move or convert a whole module for its forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accel.comm.ops import send_to_device
from accel.machine.device import default_device_type
from accel.machine.memory import clear_device_cache
from accel.machine.tree import recursively_apply
from accel.weights.hooks import (
    Arguments,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from accel.weights.tensors import Device, as_device

# Layers whose weights are large, and whose computation survives weights stored in few bits. An
# embedding has no computation that would even out what storing loses of its rows.
_CASTABLE = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward pass, after which it stays on the device.

    Args:
        execution_device: where the forward pass runs; None: the machine's accelerator, else the
            CPU.
        prev_module_hook: handle of the model before in a pipeline, which is sent to the CPU first.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        kind = default_device_type() if execution_device is None else execution_device
        self.execution_device = as_device(kind)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move a module to the CPU.

        Args:
            module: what the hook is attached to.
        """
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Move the module and its arguments to the device, and the previous model away from it.

        Args:
            module: what the hook is attached to.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(
            kwargs, self.execution_device
        )


class UserCpuOffloadHook:
    """Handle of a model that `cpu_offload_with_hook` keeps on the CPU.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Store the weights of a module in one dtype and compute in another.

    Args:
        storage_dtype: of the weights between forward passes, such as ``torch.float8_e4m3fn``.
        compute_dtype: of the weights and of floating arguments in the forward pass.
        non_blocking: whether conversions overlap with other work.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the dtype that they are stored in.

        Args:
            module: what the hook is attached to.
        """
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Convert weights and floating arguments to the dtype of the computation.

        Args:
            module: what the hook is attached to.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return self._converted(args), self._converted(kwargs)

    def _converted(self, arguments: Any) -> Any:
        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

        return recursively_apply(convert, arguments)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back to the dtype that they are stored in.

        Args:
            module: what the hook is attached to.
            output: what `forward` returned.
        """
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the dtype of the computation; what storing lost stays lost.

        Args:
            module: what the hook was attached to.
        """
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in few bits, for inference.

    Embeddings, norms and all others stay, and so does what is tied to one of them.

    Args:
        module: the model.
        storage_dtype: of the weights between forward passes, such as ``torch.float8_e4m3fn``.
        compute_dtype: of the weights in a layer's forward pass.
        skip_modules_pattern: regular expressions; modules in whose full name one is found stay.
        skip_modules_classes: modules of these classes, and all within, stay.
        non_blocking: whether conversions overlap with other work.

    Example:
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, "norm")
    """
    given = skip_modules_pattern
    patterns = [given] if isinstance(given, str) else list(given or ())

    def stays(name: str, one: nn.Module) -> bool:
        by_name = any(re.search(pattern, name) for pattern in patterns)
        return by_name or isinstance(one, skip_modules_classes or ())

    layers = _castable("", module, stays)
    cast = {id(layer) for layer in layers}
    others = (one for one in module.modules() if id(one) not in cast)
    used = {id(weight) for one in others for weight in one.parameters(recurse=False)}
    for layer in layers:
        if not used.isdisjoint(map(id, layer.parameters())):
            continue  # tied to what is not cast, such as an embedding
        hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        add_hook_to_module(layer, hook, append=True)


def _castable(
    name: str, module: nn.Module, stays: Callable[[str, nn.Module], bool]
) -> list[nn.Module]:
    if stays(name, module):
        return []
    if isinstance(module, _CASTABLE):
        return [module]
    start = f"{name}." if name else ""
    children = module.named_children()
    return [one for key, child in children for one in _castable(f"{start}{key}", child, stays)]
