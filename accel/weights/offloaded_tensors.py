"""Tensors without data that stand for offloaded weights: in a module, and in its state dict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from accel.machine.errors import StateError
from accel.machine.tree import iterate, recursively_apply

CANNOT_MOVE = (
    "You can't move a model that has some modules offloaded to cpu or disk. Remove its hooks with "
    "accel.hooks.remove_hook_from_submodules(model), or dispatch it anew, such as with "
    "dispatch_model(model, {'': 'cpu'}, offload_dir=folder)."
)
STORED_AS = "_stored_as"  # attribute of a tensor whose values were loaded to the disk: its names
_METADATA = ("detach_", "rename_", "requires_grad_", "share_memory_")  # they write no values


class _WithoutData:
    """An offloaded tensor: operations that need its values, or write to them, are refused.

    torch multiplies by a matrix on the meta device without an error, and returns whatever lies in
    memory. So no operation takes an offloaded tensor and one with data. What an operation returns
    without data is refused in the same way.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what `func` returns; raise `StateError` if that needs the values.

        Args:
            func: of torch.
            types: of the arguments that have such a method.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name == "__get__":  # such as is_meta: by far the most calls
                return _marked(func(*args))
            if func is torch.Tensor.copy_ and args[0] is args[1]:  # what load_state_dict() leaves
                return args[0]
            given = list(iterate([args, kwargs or {}]))
            ours: list[Any] = [tensor for tensor in given if isinstance(tensor, _WithoutData)]
            writes = name.endswith("_") and not name.endswith("__") and name not in _METADATA
            if writes or any(not tensor.is_meta for tensor in given):
                raise StateError(_rule(ours))
            versions = [_version(tensor) for tensor in ours]
            try:
                result = func(*args, **(kwargs or {}))
            except (RuntimeError, TypeError) as error:  # others of torch are subclasses
                if "meta" not in str(error).lower():
                    raise
                raise StateError(_rule(ours)) from error
            if versions != [_version(tensor) for tensor in ours]:
                raise StateError(_rule(ours))
            return recursively_apply(_marked, result)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _rebuilt(type(self), self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: object) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            data = self.detach().as_subclass(torch.Tensor)
        return _rebuilt, (type(self), data, self.requires_grad)

    def refuse_saving(self: Any) -> NoReturn:
        """Raise `StateError`: outside of its module the weight has no values to save."""
        raise StateError(_rule([self]))


class OffloadedWeight(_WithoutData, nn.Parameter):
    """A parameter without data, whose values are loaded for the forward pass of its module alone.

    It is copied and pickled with its module, whose hook has the values.
    """


class OffloadedBuffer(_WithoutData, torch.Tensor):
    """A buffer without data, as `OffloadedWeight`."""


class OffloadedValue(_WithoutData, torch.Tensor):
    """An offloaded weight in a state dict, or a part of one: shape and dtype alone.

    Without data a saved state dict would have lost the weight, and nothing would tell. So pickling
    is refused. A module that is pickled as a whole has its weights map; it holds no such tensor.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse_saving()


HELD = (OffloadedWeight, OffloadedBuffer)  # by modules


def _rebuilt(kind: type[torch.Tensor], data: torch.Tensor, trains: bool) -> torch.Tensor:
    return torch.Tensor._make_subclass(kind, data, trains)


def _marked(result: Any) -> Any:
    return result.as_subclass(OffloadedValue) if _is_plain(result) else result


def _is_plain(result: object) -> bool:
    return type(result) is torch.Tensor and result.is_meta


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _rule(tensors: Sequence[torch.Tensor]) -> str:
    shape = list(tensors[0].shape) if tensors else ""
    return (
        f"an offloaded weight {shape} is used, written to or saved outside the forward pass of its "
        "module, for which alone its values are loaded. To compute with it, name the class of the "
        "module that does in preload_module_classes, or keep its module on a device. To set it, "
        "use accel.utils.set_module_tensor_to_device(model, name, 'cpu', value). To save it, use "
        "accelerator.save_model(model, folder), or save what "
        "accel.utils.modeling.get_state_dict_offloaded_model(model) returns. To move it, remove "
        "the hooks with accel.hooks.remove_hook_from_submodules(model)."
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the class that refuses to be computed with, to be held anew."""
    if not isinstance(tensor, _WithoutData):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def marked_offloaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the meta device that refuses computations; a parameter itself."""
    if type(tensor) is nn.Parameter and tensor.is_meta:
        tensor.__class__ = OffloadedWeight
    return tensor.as_subclass(OffloadedBuffer) if _is_plain(tensor) else tensor


def are_alike(left: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Return whether one tensor may stand for another: shape and dtype."""
    return left.shape == loaded.shape and left.dtype == loaded.dtype


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors without data are one, or views of one."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def refuse_gradient(_: torch.Tensor) -> None:
    """Raise `StateError`: called with the gradient of an offloaded weight."""
    raise StateError(
        "a gradient of an offloaded weight: it has no memory to be kept in, and no optimizer "
        "could change the weight. Freeze it with requires_grad_(False) and train an adapter "
        "(LoRA), or keep the module on a device."
    )
