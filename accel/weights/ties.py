"""Offloaded weights while they are loaded, and tied weights of a dispatched model."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn


class LoadLock:
    """Held by a thread while it loads or offloads weights of a model, not while the model computes.

    So a forward pass may wait for another thread that runs the model, as autograd's threads do.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[LoadLock], tuple[()]]:
        return LoadLock, ()  # copies of a model do not wait for one another

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LoadedWeight:
    """One weight while it is loaded, to find out whether it was changed.

    torch counts changes of a parameter, but neither those of ``parameter.data`` in place nor those
    through a numpy view. Within a forward pass these are not found, as each pass would compare all
    weights with those on disk: they are lost unless the parameter is the offloaded weight itself,
    as where that lies in the memory of the same device.

    Args:
        tensor: what the module holds of it now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.pointer = tensor.data_ptr()  # another one after `tensor.data = ...`
        # Of buffers, torch's batch_norm changes the data without counting.
        counts = isinstance(tensor, nn.Parameter) and not tensor.is_inference()
        self.version = tensor._version if counts else None

    def changed(
        self, held: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, by_contents: bool
    ) -> bool:
        """Return whether what a module holds now differs from the value that is offloaded.

        Args:
            held: by the module.
            weights: the weights map.
            name: of the weight there.
            by_contents: whether also to find what was written to `tensor.data`, which no version
                counts.
        """
        if held.is_meta:
            return False
        same = held is self.tensor and held.data_ptr() == self.pointer
        counted = same and self.version is not None and held._version != self.version
        if same and self.version is not None and not counted and not by_contents:
            return False
        offloaded = weights[name]
        if held.data_ptr() == offloaded.data_ptr():
            return False
        if counted or held is not self.tensor:
            return True
        return not torch.equal(content_of(held), content_of(offloaded.to(held.dtype)))


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, on the CPU."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


TiedPlace = tuple[nn.Module, str]  # a module that has a weight, and its name there


class Owner(Protocol):
    """The part of a hook that ties have to do with."""

    def present(self, name: str, place: TiedPlace) -> nn.Parameter | None:
        """Return an offloaded weight while it has values: loaded, or given back."""
        ...


class Ties:
    """The hooks that offload tied weights, and the tensors of those that stay: of a whole model.

    What is assigned to a place later is no longer tied, as in a model without hooks: the others
    keep the weight that was there. Of a weight that no hook offloads any more nothing is to be
    known: its places have one tensor again.
    """

    def __init__(self) -> None:
        # The hook that offloads a weight, and its name for it.
        self.owners: dict[TiedPlace, tuple[Owner, str]] = {}
        self._residents: dict[TiedPlace, nn.Parameter] = {}

    def offload(self, place: TiedPlace, owner: Owner, name: str) -> None:
        """Note that a hook offloads the weight at a place.

        Args:
            place: of a tied weight.
            owner: the hook.
            name: of the weight in the hook's module.
        """
        self.owners[place] = owner, name
        self._residents.pop(place, None)

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
        """
        for place in places:
            owner, name = self.owners.get(place, (None, ""))
            found = self._residents.get(place) if owner is None else owner.present(name, place)
            if found is not None and not found.is_meta:
                yield found
