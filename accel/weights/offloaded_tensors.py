"""Tensors without data that stand for offloaded weights: in a module, and in its state dict."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from accel.machine.errors import StateError
from accel.machine.tree import iterate

# Attributes of a tensor without data: its name, and where its values lie; what it stands for.
ORIGIN = "_offloaded_as"
TOKEN = "_stands_for"
CANNOT_MOVE = (
    "You can't move a model that has some modules offloaded to cpu or disk. Remove its hooks with "
    "accel.hooks.remove_hook_from_submodules(model), or dispatch it anew, such as with "
    "dispatch_model(model, {'': 'cpu'}, offload_dir=folder)."
)


def _call(
    func: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    copied: Callable[[], str],
    computed: Callable[[], str],
) -> Any:
    """Return the result of an operation; raise `StateError` if it needs values that are offloaded.

    On a CPU, torch multiplies by a matrix on the meta device without an error, and returns whatever
    lies in memory. `copied` and `computed` are the messages, of a copy to another device and of a
    result with data, also one that is written to a tensor that is given.
    """
    if func is torch.Tensor.copy_ and args[0] is args[1]:  # what load_state_dict() leaves
        return args[0]
    given = list(iterate([args, kwargs or {}]))
    has_data = any(not tensor.is_meta for tensor in given)
    _refuse_writes(_targets(func, args, kwargs or {}), computed)
    versions = [_version(tensor) for tensor in given]
    try:
        result = func(*args, **(kwargs or {}))
    except (RuntimeError, TypeError) as error:  # others of torch are subclasses
        if "meta" not in str(error).lower():
            raise
        raise StateError(computed() if has_data else copied()) from error
    pairs = zip(given, versions, strict=True)
    _refuse_writes([tensor for tensor, before in pairs if _version(tensor) != before], computed)
    if has_data and _is_new(result, given):
        raise StateError(computed())
    return result


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _targets(
    func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to, by its name; others tell by their version."""
    if kwargs.get("out") is not None:
        return list(iterate(kwargs["out"]))
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name in _IN_PLACE)
    if not in_place or name in _METADATA:
        return []
    return list(iterate(args[0] if args else next(iter(kwargs.values()))))


def _refuse_writes(targets: Iterable[torch.Tensor], computed: Callable[[], str]) -> None:
    for tensor in targets:
        if type(tensor) in _VALUES:
            raise StateError(
                f"an offloaded weight {list(tensor.shape)} is written to outside the forward pass "
                "of its module, where it has no values: the write would be lost. Set it with "
                "accel.utils.set_module_tensor_to_device(model, name, 'cpu', value), or write to "
                "it within accel.utils.align_module_device(module)."
            )
        if not tensor.is_meta:
            raise StateError(computed())


def _is_new(result: object, given: Sequence[torch.Tensor]) -> bool:
    known = {id(tensor) for tensor in given}
    return any(not t.is_meta and id(t) not in known for t in iterate(result))


def _marked(result: Any, kind: type[torch.Tensor], token: object = None) -> Any:
    """Return a result whose plain tensors on the meta device are of another class."""
    if type(result) in (tuple, list):  # as of chunk
        return type(result)(_marked(one, kind) for one in result)
    if not _is_plain(result):
        return result
    marked = result.as_subclass(kind)
    if token is not None:
        marked.__dict__[TOKEN] = token
    return marked


def _derived(
    func: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    computed: Callable[[], str],
) -> Any:
    """Return what an operation derives from offloaded weights, which refuses to be computed with.

    A view and a copy of another dtype stay so; what is computed is refused at once.
    With an input on the meta device, whose shapes are asked for, it is not.
    """
    kind, name = getattr(func, "__name__", ""), _name_of(func)
    if kind == "__set__" and len(args) > 1:
        _refuse_another(name, *args)
    token = token_of(args[0]) if name in _WHOLE and args else None
    if kind == "__get__":  # such as is_meta: by far the most calls
        return _marked(func(*args), OffloadedView, token)

    def copied() -> str:
        shape = _shape(args, kwargs, _KINDS)
        return f"an offloaded weight {shape} has no values to copy. {CANNOT_MOVE}"

    result = _call(func, args, kwargs, copied if name in _MOVES else computed, computed)
    if name.endswith("_like") or name.startswith("new_"):  # of the shape alone
        return _marked(result, OffloadedResult)
    given = list(iterate([args, kwargs or {}]))
    others = [tensor for tensor in given if type(tensor) not in _KINDS]
    ours = [tensor for tensor in given if type(tensor) in _KINDS]
    is_new = any(_is_plain(one) and not _is_view(one, ours) for one in iterate(result))
    if is_new and others and all(tensor.is_meta for tensor in others):
        return _marked(result, OffloadedResult)
    if is_new and name not in _KEEP:
        raise StateError(computed())
    return _marked(result, OffloadedView, token)


def _name_of(func: object) -> str:
    """Return the name of an operation, or of the attribute that it gets or sets."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _refuse_another(attribute: str, tensor: object, value: object) -> None:
    """Refuse to set the data of a tensor to an offloaded weight, unless it is the same one."""
    if attribute == "data" and type(value) in _VALUES:
        token = token_of(value)
        if token is None or token is not token_of(tensor):
            raise StateError(
                f"the data of a tensor {list(getattr(tensor, 'shape', ()))} is set to an offloaded "
                "weight, or to a part of one, which has no values. Tie and change weights before "
                "dispatch_model, or after accel.hooks.remove_hook_from_submodules(model)."
            )


def _is_view(result: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    memory = result.untyped_storage()._cdata
    return any(tensor.untyped_storage()._cdata == memory for tensor in given)


class _Unused:
    """Operations that would need the values of an offloaded tensor are refused."""

    _unused = (
        "is used while its module does not run: its values are loaded for the forward pass of that "
        "module alone. Name the class of the module that uses it in preload_module_classes, or "
        "keep its module on a device."
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Return what `func` returns; raise `StateError` if that needs the values.

        Args:
            func: of torch.
            types: of the arguments that have such a method.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return _derived(func, args, kwargs, functools.partial(_used, args, kwargs, cls._unused))


class _Held(_Unused):
    """An offloaded tensor that a module has. It is copied and pickled with its module."""

    def detach(self: Any) -> OffloadedValue:
        """Return the tensor for a state dict, also of a model whose hooks were removed."""
        with torch._C.DisableTorchFunctionSubclass():
            detached = torch.Tensor.detach(self).as_subclass(OffloadedValue)
        detached.__dict__[TOKEN] = token_of(self)
        return detached

    def refuse_saving(self: Any) -> NoReturn:
        """Raise `StateError`: outside of its module the weight has no values to save."""
        raise StateError(_not_saved([self.detach()], None))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                data = self.data.clone()
                copied = torch.Tensor._make_subclass(type(self), data, self.requires_grad)
            for known in {ORIGIN, TOKEN} & self.__dict__.keys():
                copied.__dict__[known] = copy.deepcopy(self.__dict__[known], memo)
            memo[id(self)] = copied
        return memo[id(self)]


class OffloadedWeight(_Held, nn.Parameter):
    """A parameter without data, whose values are loaded for the forward pass of its module alone.

    Operations that would need the values are refused, also with views of it.
    """

    def __reduce_ex__(self, protocol: object) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            rebuild, args, *_ = super().__reduce_ex__(protocol)
        return _rebuilt, (type(self), rebuild, args)


class LeftWeight(OffloadedWeight):
    """An offloaded weight that no hook loads.

    It was loaded to the disk, and its model is not dispatched yet; or its file was gone when its
    hook was removed.
    """

    _unused = (
        "is used that no hook loads the values of. Dispatch the model, such as with "
        "dispatch_model(model, {'': 'cpu'}, offload_dir=folder), or load a checkpoint into it."
    )


class OffloadedValue(torch.Tensor):
    """An offloaded weight in a state dict: shape and dtype alone, which are not to be saved.

    Without data a saved state dict would have lost the weight, and nothing would tell. So pickling
    is refused, and what would copy the values. What is derived from it (a view, another dtype) is
    refused likewise. A module that is pickled as a whole has its weights map; it holds no such
    tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Return what `func` returns; raise `StateError` if that needs the values.

        Args:
            func: of torch.
            types: of the arguments that have such a method.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        with torch._C.DisableTorchFunctionSubclass():
            rule = functools.partial(_not_saved, args, kwargs)
            is_whole = _name_of(func) in _WHOLE and args
            token = token_of(args[0]) if is_whole else None
            return _marked(_call(func, args, kwargs, rule, rule), cls, token)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(_not_saved([self], None))

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedValue:
        return memo.setdefault(id(self), self.detach())


class OffloadedView(_Unused, OffloadedValue):
    """A view of an offloaded weight, or its shape in another dtype: without values, as the weight.

    Torch computes with a plain view on the meta device as if it had data.
    """


class OffloadedBuffer(_Held, OffloadedValue):
    """A buffer without data, as `OffloadedWeight`."""

    def __reduce_ex__(self, protocol: object) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.__reduce_ex__(self, protocol)


class LeftBuffer(OffloadedBuffer):
    """A buffer without data, as `LeftWeight`."""

    _unused = LeftWeight._unused


class OffloadedResult(OffloadedView):
    """The shape of what an offloaded weight and an input on the meta device give."""


def _rebuilt(
    kind: type[OffloadedWeight], rebuild: Callable[..., nn.Parameter], args: Sequence[object]
) -> nn.Parameter:
    weight = rebuild(*args)
    weight.__class__ = kind
    return weight


# What needs no values; a result of other operations that is no view does.
_KEEP = (
    *("clone", "contiguous", "flatten", "reshape"),
    *("bfloat16", "double", "float", "half", "to", "type", "type_as"),
)
_MOVES = ("to", "cpu", "cuda")
# What gives all of a weight, laid out as it is: the name of an attribute, too.
_WHOLE = frozenset((*_KEEP, *_MOVES, "data", "detach")) - {"flatten", "reshape"}
_METADATA = ("detach_", "rename_", "requires_grad_", "share_memory_")  # they write no values
_IN_PLACE = (
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__"),
    *("__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
    *("__ilshift__", "__irshift__", "__idiv__"),
)
HELD = (OffloadedWeight, LeftWeight, OffloadedBuffer, LeftBuffer)  # by modules
_KINDS = (*HELD, OffloadedView)
_VALUES = (*_KINDS, OffloadedValue)


def _is_plain(result: object) -> bool:
    return type(result) is torch.Tensor and result.is_meta


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the class that refuses to be computed with, to be held anew."""
    if not isinstance(tensor, OffloadedValue):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _used(args: Sequence[object], kwargs: Mapping[str, object] | None, rule: str) -> str:
    return f"an offloaded weight {_shape(args, kwargs, _KINDS)} {rule}"


def _not_saved(args: Sequence[object], kwargs: Mapping[str, object] | None) -> str:
    shape = _shape(args, kwargs, OffloadedValue)
    return (
        f"an offloaded weight {shape} of a state dict is saved or copied: state_dict() of a model "
        "with offloaded weights has their shapes without their values. Save the model with "
        "accelerator.save_model(model, folder), or save what "
        "accel.utils.modeling.get_state_dict_offloaded_model(model) returns."
    )


def _shape(args: Sequence[object], kwargs: Mapping[str, object] | None, kind: Any) -> str:
    found = (tensor for tensor in iterate([args, kwargs or {}]) if isinstance(tensor, kind))
    return next((str(list(tensor.shape)) for tensor in found), "")


def marked_offloaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the meta device that refuses computations; a parameter itself."""
    kind = type(tensor)
    if kind in (nn.Parameter, LeftWeight) and tensor.is_meta:
        tensor.__class__ = OffloadedWeight
    if kind is LeftBuffer:
        tensor.__class__ = OffloadedBuffer
    marked = tensor.as_subclass(OffloadedBuffer) if _is_plain(tensor) else tensor
    marked.__dict__.setdefault(TOKEN, object())
    return marked


def are_alike(left: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Return whether one tensor may stand for another: shape and dtype."""
    return left.shape == loaded.shape and left.dtype == loaded.dtype


def token_of(tensor: object) -> object:
    """Return what tells an offloaded tensor from others, whose shapes may be equal, or None."""
    return getattr(tensor, "__dict__", {}).get(TOKEN)


def is_of(tensor: torch.Tensor, tokens: Iterable[object]) -> bool:
    """Return whether a tensor stands for an offloaded one: a copy without data, or empty.

    Args:
        tensor: in the place of an offloaded one.
        tokens: of that, and of others that are tied to it.
    """
    if not isinstance(tensor, _VALUES):
        return tensor.is_meta
    token = token_of(tensor)
    return any(token is one for one in tokens if one is not None)


def mark_left(tensor: torch.Tensor) -> None:
    """Mark an offloaded weight or buffer that no hook loads any more, in place."""
    if type(tensor) is OffloadedWeight:
        tensor.__class__ = LeftWeight
    elif type(tensor) is OffloadedBuffer:
        tensor.__class__ = LeftBuffer


def is_loaded_by_hook(tensor: object) -> bool:
    """Return whether a tensor stands for an offloaded weight or buffer that a hook loads."""
    return type(tensor) in (OffloadedWeight, OffloadedBuffer)


def is_left(tensor: object) -> bool:
    """Return whether an offloaded weight or buffer is one that no hook loads any more."""
    return type(tensor) in (LeftWeight, LeftBuffer)


def mark_in_state_dict(state: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Have tensors of a state dict that have no data refuse to be saved."""
    for name in names:
        if _is_plain(state.get(name)):
            state[name] = state[name].as_subclass(OffloadedValue)


def refuse_gradient(_: torch.Tensor) -> None:
    """Raise `StateError`: called with the gradient of an offloaded weight."""
    raise StateError(
        "a gradient of an offloaded weight: it has no memory to be kept in, and no optimizer "
        "could change the weight. Freeze it with requires_grad_(False) and train an adapter "
        "(LoRA), or keep the module on a device."
    )
