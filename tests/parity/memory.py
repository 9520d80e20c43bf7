"""Bytes of live tensor storages, found by walking the process, and of DDP's buckets."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parallel import DistributedDataParallel


class Walk:
    """Counts what came to life since it was made.

    The collector forgets what lived before, 300,000 objects of the imports, so that a count looks
    at the new ones alone. Storages of before are held until the walk is forgotten: a new tensor may
    use one, and their addresses are not given to others meanwhile.

    Args:
        step: the optimizer step at which `count` counts; moments of AdamW exist from the second on.
    """

    def __init__(self, step: int = 2) -> None:
        gc.unfreeze()
        gc.collect()
        self.step = step
        self.before = storages(gc.get_objects())
        gc.freeze()

    def count(self, step: int, moment: str) -> int | None:
        """Return the bytes of the storages and buckets that came to life, None at other steps.

        Counted until two counts agree: a thread of gloo lets go of a message some time later.
        """
        if step != self.step:
            return None
        gc.collect()
        count = self._num_bytes()
        for _ in range(20):
            time.sleep(0.1)
            before, count = count, self._num_bytes()
            if count == before:
                break
        return count

    def _num_bytes(self) -> int:
        objects = gc.get_objects()
        live = storages(objects)
        held = sum(s.nbytes() for at, s in live.items() if at not in self.before)
        return held + bucket_bytes(objects)


def bucket_bytes(objects: list[Any]) -> int:
    """Return the bytes of the buckets that DDP's reducers exchange, by what torch logs of them.

    No tensor of Python's shows them, unless gradients are views into them.
    """
    total = 0
    for item in objects:
        if issubclass(type(item), DistributedDataParallel) and not item.gradient_as_bucket_view:
            sizes = item._get_ddp_logging_data()["bucket_sizes"]
            total += sum(int(size) for size in sizes.split(","))
    return total


def storages(objects: list[Any]) -> dict[int, torch.UntypedStorage]:
    """Return all storages with memory of their own that a tensor among `objects` uses."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors(objects):
        if tensor.layout != torch.strided or tensor.device.type in ("meta", "xla"):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            found[storage.data_ptr()] = storage
    return found


def tensors(objects: list[Any]) -> Iterator[torch.Tensor]:
    """Yield every tensor among `objects`, local shards and gradients too.

    But for those that stand for others while the compiler traces: they have no memory of their own.
    """
    for item in objects:
        kind = type(item)  # `isinstance` would ask lazy proxies, which import things then
        if not issubclass(kind, torch.Tensor) or stands_for_another(item):
            continue
        yield from local(item)
        if item.is_leaf and item.grad is not None and not stands_for_another(item.grad):
            yield from local(item.grad)


def stands_for_another(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a stand-in of the compiler's tracing."""
    return torch._is_functional_tensor(tensor) or is_fake(tensor)


def local(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `tensor`, or this process's shard of it."""
    shard = getattr(tensor, "_local_tensor", None)
    yield tensor if shard is None else shard
