"""Undo a dispatch: remove its hooks, with or without the values of offloaded weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from accel.logging import get_logger
from accel.machine.errors import ConfigError, StateError
from accel.precision.wrapping import is_dispatched
from accel.weights.align import AlignDevicesHook
from accel.weights.hooks import (
    SequentialHook,
    add_hook_to_module,
    check_removable,
    hooks_of,
    remove_hook_from_module,
)
from accel.weights.offloaded_state import align_hooks
from accel.weights.offloaded_tensors import CANNOT_MOVE, mark_left
from accel.weights.tensors import held_in, named_module_tensors
from accel.weights.ties import forget_removed

logger = get_logger(__name__)

_MOVES = ("to", "cpu", "cuda")  # methods of a module


def undo(model: nn.Module) -> None:
    """Undo an earlier dispatch: its hooks are removed, and weights lie where it had them.

    Other hooks stay.

    Args:
        model: dispatched or not.

    Raises:
        StateError: for an offloaded weight that was assigned to another; nothing is undone.
    """
    check_removable(model)
    for module in model.modules():
        others = [hook for hook in hooks_of(module) if not isinstance(hook, AlignDevicesHook)]
        if len(others) < len(hooks_of(module)):
            remove_hook_from_module(module)
            if others:
                hook = others[0] if len(others) == 1 else SequentialHook(*others)
                add_hook_to_module(module, hook)
    for name in _MOVES:
        if isinstance(model.__dict__.get(name), _Guarded):
            delattr(model, name)
    model.__dict__.pop("hf_device_map", None)
    forget_removed()


@contextlib.contextmanager
def undone_if_refused(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was where hooks of a dispatch cannot be attached to one of its modules.

    Args:
        model: is dispatched within.
    """
    try:
        yield
    except ConfigError:
        undo(model)
        raise


def undo_for_loading(model: nn.Module, names: Collection[str]) -> None:
    """Undo an earlier dispatch of a model, some of whose weights are to be loaded.

    Those that are offloaded stay without values, and tied: the old ones are neither read, as their
    files may be gone, nor overwritten, as they may be others'.

    Args:
        model: dispatched or not.
        names: full names of the weights to be loaded, with those that are tied to them.
    """
    left: list[tuple[nn.Module, str, AlignDevicesHook]] = []
    for path, module in model.named_modules():
        for hook in align_hooks(module):
            found = [
                name
                for name in hook.offloaded(module)
                if (f"{path}.{name}" if path else name) in names and _is_away(hook, name)
            ]
            hook.kept |= frozenset(found)  # not to be restored
            left += [(module, name, hook) for name in found]
    undo(model)
    for module, name, hook in left:
        held, key = held_in(module, name)
        for owner, other in hook.tied.get(name, ())[:1]:
            held[key] = owner._parameters[other]
        mark_left(held[key])
        for alias in hook.aliases.get(name, ()):
            owners, other = held_in(module, alias)
            owners[other] = held[key]


def _is_away(hook: AlignDevicesHook, name: str) -> bool:
    """Return whether no module has an offloaded weight in memory that is tied to others."""
    return next(hook.ties.present(hook.tied.get(name, ())), None) is None


class _Guarded:
    """`to`, `cpu` or `cuda` of a dispatched model, whose hooks would not know of a move."""

    def __init__(self, model: nn.Module, name: str) -> None:
        functools.update_wrapper(self, getattr(type(model), name))
        self.model = model
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        # A decorated method, as of transformers, is found under its class alone.
        return {"model": self.model, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # it is made in full

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        # Another dtype alone is no move: weights are converted when they are loaded.
        given = (*args, *kwargs.values())
        moves = not given or not all(isinstance(one, (torch.dtype, bool)) for one in given)
        tensors = named_module_tensors(self.model, recurse=True)
        if moves and any(tensor.is_meta for _, tensor in tensors):
            raise StateError(CANNOT_MOVE)
        if moves and is_dispatched(self.model):
            logger.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
        moved: nn.Module = getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        return moved


def guard(model: nn.Module) -> None:
    """Refuse to move a dispatched model as a whole.

    Args:
        model: gets its own `to`, `cpu` and `cuda`.
    """
    for name in _MOVES:
        setattr(model, name, _Guarded(model, name))
