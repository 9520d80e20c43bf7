"""Offloaded weights while they are loaded, and tied weights of a dispatched model."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from accel.machine.errors import CheckpointError, ConfigError, StateError
from accel.weights.folder import Weights
from accel.weights.offloaded_tensors import is_left, token_of


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

    @property
    def weights_map(self) -> Weights | None:
        """The offloaded weights by name."""
        ...

    @property
    def restored(self) -> dict[str, nn.Parameter]:
        """What a module was given back, by name."""
        ...

    @property
    def is_attached(self) -> bool:
        """Whether a module has the hook."""
        ...

    @property
    def tied(self) -> Mapping[str, Sequence[TiedPlace]]:
        """Of tied weights, by name: all places."""
        ...

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.owners:
            _LIVE.add(self)

    def offload(self, place: TiedPlace, owner: Owner, name: str) -> None:
        """Note that a hook offloads the weight at a place.

        Args:
            place: of a tied weight.
            owner: the hook.
            name: of the weight in the hook's module.
        """
        _LIVE.add(self)
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

        Raises:
            StateError: where `functional_call` has replaced one: it does not know of the others.
        """
        for module, name in places:
            held = module._parameters.get(name)
            is_replaced = held is not None and not isinstance(held, nn.Parameter)
            if is_replaced and (module, name) not in self.owners:
                raise StateError(
                    f"{name} of {type(module).__name__} is replaced, as by functional_call, and "
                    "is tied to an offloaded weight, which keeps its value. Keep the modules of "
                    "tied weights on a device, or call functional_call before dispatch_model."
                )
            yield from self._present([(module, name)])

    def _present(self, places: Iterable[TiedPlace]) -> Iterator[nn.Parameter]:
        for place in places:
            owner, name = self.owners.get(place, (None, ""))
            found = self._residents.get(place) if owner is None else owner.present(name, place)
            if found is not None and not found.is_meta:
                yield found

    def holds(self, place: TiedPlace, weight: torch.Tensor) -> bool:
        """Return whether the tensor at a place is that of a tied weight.

        Args:
            place: of a weight.
            weight: that lies there.
        """
        return any(one is weight for one in self._present([place]))

    def offloaded(self) -> set[TiedPlace]:
        """Return all places of the weights that hooks offload."""
        attached = ((owner, name) for owner, name in self.owners.values() if owner.is_attached)
        return {place for owner, name in attached for place in owner.tied.get(name, ())}

    def forget_removed(self) -> None:
        """Let go of the weights that no hook offloads any more."""
        known = self.offloaded()
        self.owners = {place: one for place, one in self.owners.items() if place in known}
        self._residents = {place: one for place, one in self._residents.items() if place in known}

    def places_of(self, weight: nn.Parameter) -> Sequence[TiedPlace]:
        """Return all places of a tied weight; empty if it is none of this model's.

        Args:
            weight: a tensor without values in the place of one.
        """
        for (module, name), (owner, own) in self.owners.items():
            if owner.is_attached and module._parameters.get(name) is weight:
                return owner.tied.get(own, ())
        return ()

    def has_values_in(self, weight: nn.Parameter, tensors: Container[int]) -> bool:
        """Return whether an offloaded weight is tied to one that has values.

        Args:
            weight: a tensor without values in the place of one.
            tensors: the `id` of those that count.
        """
        return any(id(one) in tensors for one in self._present(self.places_of(weight)))

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


# Of all models: a tensor does not know its own, which it would be pickled with.
_LIVE: weakref.WeakSet[Ties] = weakref.WeakSet()


def forget_removed() -> None:
    """Let go of the tied weights whose hooks were removed, of all models."""
    for ties in list(_LIVE):
        ties.forget_removed()


def trains_in(weight: nn.Parameter, tensors: Container[int]) -> bool:
    """Return whether an offloaded weight is tied to one of some tensors, and so can train.

    Args:
        weight: a tensor without values in the place of one.
        tensors: the `id` of each of them.
    """
    return any(ties.has_values_in(weight, tensors) for ties in list(_LIVE))


def refuse_tied_elsewhere(place: TiedPlace, weight: torch.Tensor, dispatch: Ties) -> None:
    """Refuse to offload a weight that an earlier dispatch offloads by another of its names.

    Two hooks would have a value of it each.

    Args:
        place: of the weight.
        weight: that lies there.
        dispatch: the ties of that which is to offload it.

    Raises:
        ConfigError: if another dispatch has it.
    """
    others = (ties for ties in list(_LIVE) if ties is not dispatch and ties.holds(place, weight))
    if any(place in ties.offloaded() for ties in others):
        module, name = place
        raise ConfigError.of(
            f"{name} of {type(module).__name__}",
            "it is tied to a weight outside of what is dispatched, which an earlier dispatch "
            "offloads",
            "Dispatch the model that has both with one device_map, or after this one, or remove "
            "its hooks first: accel.hooks.remove_hook_from_submodules(model).",
        )


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
