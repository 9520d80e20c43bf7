"""Epochs of data sets, several loaders of which may read one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from accel.data.order_source import Order

# The order of the loader that set the epoch of a data set last, by the id of the data set. While an
# order lives, so do its loader and the data set: ids are not mistaken for those of earlier objects.
_SETTERS: dict[int, weakref.ref[Order]] = {}
# The epoch that it set, with the data set (None: it allows no weak references).
_EPOCHS: dict[int, tuple[int, weakref.ref[object] | None]] = {}
_END = object()


class TakesEpoch(Protocol):
    """A data set that is given the number of each pass."""

    def set_epoch(self, epoch: int, /) -> object:
        """Take the number of the next pass, from 0 on."""


def chosen(dataset: object) -> int | None:
    """Return the epoch that the caller gave a data set since a loader did, None if it gave none.

    It is seen where the data set keeps it as `epoch` or `_epoch`.
    """
    if not hasattr(dataset, "set_epoch"):
        return None
    epoch = getattr(dataset, "epoch", getattr(dataset, "_epoch", None))
    if isinstance(epoch, torch.Tensor) and epoch.numel() == 1:  # shared with workers
        epoch = int(epoch)
    is_epoch = type(epoch) is int and epoch >= 0
    return epoch if is_epoch and epoch != _last_set(dataset) else None


def set_epoch(dataset: TakesEpoch, order: Order, epoch: int) -> bool:
    """Give the data set the epoch, unless `order` set it last; return whether it was given."""
    last = _SETTERS.get(id(dataset))
    if last is not None and last() is order and order.epoch_set == epoch:
        return False
    dataset.set_epoch(epoch)
    note(dataset, order, epoch)
    return True


def kept(
    dataset: TakesEpoch, order: Order, batches: Iterator[object], epoch: int
) -> Iterator[object]:
    """Yield `batches`; set `epoch` again where another loader set one of its own meanwhile."""
    while True:
        last = _SETTERS.get(id(dataset))
        if last is None or last() is not order:
            dataset.set_epoch(epoch)
            note(dataset, order, epoch)
        batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def note(dataset: object, order: Order, epoch: int) -> None:
    """Note that `dataset` has the epoch of the loader of `order`."""
    _SETTERS[id(dataset)] = weakref.ref(order)
    try:
        _EPOCHS[id(dataset)] = epoch, weakref.ref(dataset)
    except TypeError:  # of a class with __slots__
        _EPOCHS[id(dataset)] = epoch, None
    order.epoch_set = epoch


def _last_set(dataset: object) -> int:
    """Return the epoch that a loader set last; 0, where epochs begin, if none did."""
    epoch, reference = _EPOCHS.get(id(dataset), (0, None))
    setter = _SETTERS.get(id(dataset))
    is_alive = setter is not None and setter() is not None
    return epoch if is_alive or (reference is not None and reference() is dataset) else 0
