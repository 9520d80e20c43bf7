"""Tied weights of a dispatched model: where they are, and which tensors there are them still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from accel.errors import CheckpointError, StateError
from accel.large.offloaded_tensors import is_left, token_of
from accel.large.weights_map import Weights

TiedPlace = tuple[nn.Module, str]  # a module that has a weight, and its name there


class Owner(Protocol):
    """The part of a hook that ties have to do with."""

    @property
    def weights_map(self) -> Weights | None:
        """The offloaded weights by name."""
        ...

    def present(self, name: str, place: TiedPlace) -> nn.Parameter | None:
        """Return an offloaded weight while it has values: loaded, or given back."""
        ...


class Ties:
    """The hooks that offload tied weights, and the tensors of those that stay: of a whole model.

    What is assigned to a place later is no longer tied, as in a model without hooks: the others
    keep the weight that was there.
    """

    def __init__(self) -> None:
        # The hook that offloads a weight, and its name for it.
        self.owners: dict[TiedPlace, tuple[Owner, str]] = {}
        self._residents: dict[TiedPlace, nn.Parameter] = {}

    def note_residents(self, places: Iterable[TiedPlace]) -> None:
        """Note the tensors of the weights that stay.

        Args:
            places: of tied weights, of which the hooks known as owners offload some.
        """
        for module, name in places:
            weight = module._parameters[name]
            if (module, name) not in self.owners and weight is not None and not weight.is_meta:
                self._residents[module, name] = weight

    def present(self, places: Iterable[TiedPlace]) -> Iterator[nn.Parameter]:
        """Yield the tensors of a tied weight that have values.

        Args:
            places: of the weight.

        Raises:
            StateError: where `functional_call` has replaced one: it does not know of the others.
        """
        for place in places:
            owner, name = self.owners.get(place, (None, ""))
            found = self._resident(place) if owner is None else owner.present(name, place)
            if found is not None and not found.is_meta:
                yield found

    def _resident(self, place: TiedPlace) -> nn.Parameter | None:
        module, name = place
        held = module._parameters.get(name)
        if held is not None and not isinstance(held, nn.Parameter):
            raise StateError(
                f"{name} of {type(module).__name__} is replaced, as by functional_call, and is "
                "tied to an offloaded weight, which keeps its value. Keep the modules of tied "
                "weights on a device, or call functional_call before dispatch_model."
            )
        return self._residents.get(place)

    def stored(self, places: Iterable[TiedPlace], weights: Weights, name: str) -> torch.Tensor:
        """Return an offloaded weight, by another of its names where the file of this one is gone.

        Args:
            places: of the weight.
            weights: where it is offloaded.
            name: of it there.

        Raises:
            CheckpointError: if no file is left.
        """
        try:
            return weights[name]
        except CheckpointError:
            for owner, other in (self.owners[one] for one in places if one in self.owners):
                if owner.weights_map is not None and owner.weights_map is not weights:
                    with contextlib.suppress(CheckpointError):  # the first one is raised
                        return owner.weights_map[other]
            raise


def left_of(places: Iterable[TiedPlace]) -> nn.Parameter | None:
    """Return a tensor without values that stands for a tied weight whose files are gone, or None.

    Args:
        places: of the weight.
    """
    weights = (module._parameters.get(name) for module, name in places)
    return next((one for one in weights if one is not None and is_left(one)), None)


def tokens_of(places: Iterable[TiedPlace]) -> list[object]:
    """Return what tells a tied weight without values from others, where it is, or None.

    Args:
        places: of the weight.
    """
    return [token_of(module._parameters[name]) for module, name in places]
