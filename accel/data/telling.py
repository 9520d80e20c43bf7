"""Data sets learn the epoch of the loader that reads them, though several may read one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel.data.iterable import IterableDatasetShard
from accel.data.order import Order
from accel.errors import Problem

if TYPE_CHECKING:
    from accel.data.base import PreparedLoader

# The order of the loader that told a data set its epoch last, by the id of the data set. While an
# order lives, so do its loader and the data set: ids are not mistaken for those of earlier objects.
_TELLERS: dict[int, weakref.ref[Order]] = {}
_END = object()


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
    _TELLERS[id(dataset)] = weakref.ref(order)
    order.told = epoch


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
