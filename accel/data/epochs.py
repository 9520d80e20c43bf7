"""Data sets learn the epoch of the loader that reads them, though several may read one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from accel.data.iterable import IterableDatasetShard
from accel.data.order import Order
from accel.data.samplers import sampler_epoch
from accel.errors import Problem

if TYPE_CHECKING:
    from accel.data.base import PreparedLoader

# The order of the loader that told a data set its epoch last, by the id of the data set. While an
# order lives, so do its loader and the data set: ids are not mistaken for those of earlier objects.
_TELLERS: dict[int, weakref.ref[Order]] = {}
# The epoch that it told, with the data set (None: it allows no weak references).
_EPOCHS: dict[int, tuple[int, weakref.ref[Any] | None]] = {}
_END = object()


def heed(loader: PreparedLoader) -> None:
    """Take over the epoch of a data set that the caller told it since a loader did.

    It is seen where the data set keeps it as `epoch` or `_epoch`. The epoch of a sampler, and that
    of a pass that is gone on with, hold.
    """
    order, dataset = loader._order, _told_by(loader)
    goes_on = order.resumed is not None or (loader._goes_on and order.started is not None)
    if order.under_way or goes_on or not hasattr(dataset, "set_epoch"):
        return
    epoch = _epoch_of(dataset)
    if epoch in (None, _last_told(dataset)) or _sampler_epoch(loader) is not None:
        return
    _note(dataset, order, epoch)
    loader._advance(epoch)


def tell(loader: PreparedLoader) -> int | None:
    """Tell the data set the epoch, unless `loader` told it last; None if it wants none."""
    dataset = _told_by(loader)
    if not hasattr(dataset, "set_epoch"):
        return None
    order, epoch = loader._order, loader.epoch
    last = _TELLERS.get(id(dataset))
    if last is None or last() is not order or order.told != epoch:
        _hand_on(dataset, order, epoch)
        _warn_of_workers(loader, epoch)
    return epoch


def told(loader: PreparedLoader, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
    """Tell the data set `epoch` again where another loader told it one of its own meanwhile."""
    dataset, order = _told_by(loader), loader._order
    while True:
        last = _TELLERS.get(id(dataset))
        if last is None or last() is not order:
            _hand_on(dataset, order, epoch)
        batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _told_by(loader: PreparedLoader) -> Any:
    dataset: Any = loader.dataset
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


def _hand_on(dataset: Any, order: Order, epoch: int) -> None:
    dataset.set_epoch(epoch)
    _note(dataset, order, epoch)


def _note(dataset: Any, order: Order, epoch: int) -> None:
    _TELLERS[id(dataset)] = weakref.ref(order)
    try:
        _EPOCHS[id(dataset)] = epoch, weakref.ref(dataset)
    except TypeError:  # of a class with __slots__
        _EPOCHS[id(dataset)] = epoch, None
    order.told = epoch


def _last_told(dataset: Any) -> int:
    """Return the epoch that a loader told `dataset` last; 0, where epochs begin, if none did."""
    epoch, reference = _EPOCHS.get(id(dataset), (0, None))
    teller = _TELLERS.get(id(dataset))
    told = teller is not None and teller() is not None
    return epoch if told or (reference is not None and reference() is dataset) else 0


def _sampler_epoch(loader: PreparedLoader) -> int | None:
    return sampler_epoch(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _epoch_of(dataset: Any) -> int | None:
    """Return the epoch that a data set keeps, None if it shows none."""
    found = getattr(dataset, "epoch", getattr(dataset, "_epoch", None))
    if isinstance(found, torch.Tensor) and found.numel() == 1:  # shared with workers
        found = int(found)
    return found if type(found) is int and found >= 0 else None


def _warn_of_workers(loader: PreparedLoader, epoch: int) -> None:
    if loader.persistent_workers and loader._iterator is not None:
        loader._warn_once(
            Problem(
                f"epoch {epoch} of a loader with persistent_workers=True",
                "workers that live on keep the data set as it was when they started, so that "
                f"{type(loader.dataset).__name__}.set_epoch does not reach them",
                "Set persistent_workers=False.",
            )
        )
