"""State dicts of a module whose hook offloads its weights: what they hold, and what they load."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from accel.weights.loaded_weight import content_of
from accel.weights.offloaded_tensors import mark_in_state_dict, token_of
from accel.weights.tensors import held_in
from accel.weights.ties import TiedPlace, Ties, tokens_of
from accel.weights.weights_map import Weights, in_memory


class Offloading(Protocol):
    """The part of a hook that a module's state dict has to do with."""

    @property
    def tied(self) -> Mapping[str, Sequence[TiedPlace]]:
        """Of tied weights, by name: where else they are."""
        ...

    @property
    def ties(self) -> Ties:
        """What is tied in the whole model."""
        ...

    @property
    def weights_map(self) -> Weights | None:
        """The offloaded weights by name."""
        ...

    @property
    def lock(self) -> AbstractContextManager[None]:
        """Held while weights are loaded or written."""
        ...

    def offloaded(self, module: nn.Module) -> list[str]:
        """Return the names of the offloaded tensors."""
        ...

    def all_names(self, name: str) -> list[str]:
        """Return the name of an offloaded tensor, and its other names in the module."""
        ...

    def resident(self, name: str) -> nn.Parameter | None:
        """Return the tensor that an offloaded one is tied to and that stays, if there is one."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Return an offloaded weight."""
        ...

    def write(self, module: nn.Module, name: str, value: torch.Tensor) -> bool:
        """Keep another value of an offloaded tensor."""
        ...


class MarkStateDict:
    """Has offloaded tensors in a module's state dict refuse to be saved without their values.

    An object: torch notes in a hook of a state dict how it was registered.
    """

    def __init__(self, hook: Offloading) -> None:
        self._offloading = hook

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
    ) -> None:
        hook = self._offloading
        names = [one for name in hook.offloaded(module) for one in hook.all_names(name)]
        mark_in_state_dict(state_dict, [f"{prefix}{name}" for name in names])


class LoadStateDict:
    """Takes a state dict's values of offloaded tensors, or reports those that have no place.

    Values that are offloaded already are compared; buffers, and what lies in memory, are written.
    Of a state dict of the model itself, which has no values, the weights stay as they are. torch
    then finds the tensors themselves, and leaves them as they are, also of those that are
    refused: it would assign values of ``assign=True``, or propose that.
    """

    def __init__(self, hook: Offloading) -> None:
        self._offloading = hook

    def __call__(
        self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *others: Any
    ) -> None:
        refused, empty = list[str](), list[str]()
        assigns = bool(others[0].get("assign_to_params_buffers"))
        for name in self._offloading.offloaded(module):
            held, key = held_in(module, name)
            for full in (f"{prefix}{one}" for one in self._offloading.all_names(name)):
                value = state_dict.get(full)
                if value is None or value.shape != held[key].shape:
                    continue
                state_dict[full] = held[key]
                if value.is_meta:
                    own = tokens_of(self._offloading.tied.get(name, ())) or [token_of(held[key])]
                    if token_of(value) is None or token_of(value) not in own:
                        empty.append(full)
                elif not self._takes(module, name, value.to(held[key].dtype), assigns):
                    refused.append(full)
        error_messages: list[str] = others[-1]
        if empty:
            error_messages.append(
                f"{', '.join(empty)}: the state dict has no values of these weights, as they are "
                "offloaded or on the meta device where it is from. Pass what "
                "accel.utils.modeling.get_state_dict_offloaded_model(model) returns."
            )
        if refused:
            error_messages.append(
                f"{', '.join(refused)}: offloaded weights cannot be loaded into a dispatched model "
                "unless they are equal. Load them with accel.load_checkpoint_and_dispatch, or "
                "before dispatch_model."
            )

    def _takes(self, module: nn.Module, name: str, value: torch.Tensor, assigns: bool) -> bool:
        """Return whether an offloaded tensor has a value of a state dict now.

        To assign values unties: it is not written to a weight that stays and is tied to this one.
        """
        hook, (held, key) = self._offloading, held_in(module, name)
        with hook.lock:
            resident = hook.resident(name)
            if resident is not None and assigns:
                if hook.ties.take_assigned(hook.tied[name], value):
                    return True
            elif resident is not None:
                with torch.no_grad():
                    resident.copy_(value)
                return True
            present = hook.weight(name).to(value.dtype)
            if torch.equal(content_of(present), content_of(value)):
                return True
            fits = in_memory(hook.weights_map, name) or not isinstance(held[key], nn.Parameter)
            return fits and name not in hook.tied and hook.write(module, name, value)
