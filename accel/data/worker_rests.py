"""The last rounds of a sharded stream that loader workers read: what each has left is joined.

Each worker iterates a part of the stream, and none knows when the others end. So a worker that
runs out of full rounds hands over the samples that it has left, all ranks' ones; the loader cuts
rounds from those of all workers at the end of the pass, and only the last of them is completed.
Every rank has the same samples left, so that ranks make as many steps.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from accel.comm import rng
from accel.data.iterable import IterableDatasetShard, Rest
from accel.machine.errors import Problem


@contextlib.contextmanager
def handed_over(loader: DataLoader[object]) -> Iterator[None]:
    """Have the workers that `loader` starts in the context hand over what they have left.

    Args:
        loader: over an `IterableDatasetShard`; it reads by `joined`.
    """
    shard: IterableDatasetShard = loader.dataset  # type: ignore[assignment]
    users = loader.collate_fn
    loader.collate_fn, shard.hands_over = (
        _Collate(users, shard, loader.batch_size is not None),
        True,
    )
    try:
        yield
    finally:
        loader.collate_fn, shard.hands_over = users, False


def joined(
    loader: DataLoader[object],
    batches: Iterator[object],
    found: list[Rest],
    epoch: int,
    given: int = 0,
) -> Iterator[object]:
    """Yield the batches of a pass, then those of what its workers have left.

    The shard's `remainder` is known afterwards.

    Args:
        loader: over an `IterableDatasetShard`.
        batches: torch's iterator, whose workers were started in `handed_over`.
        found: takes up what workers handed over, when it is read.
        epoch: number of the pass.
        given: in how many first batches of an earlier version, which had no joined ones, workers
            gave what they had left: None in its place is skipped.
    """
    shard: IterableDatasetShard = loader.dataset  # type: ignore[assignment]
    unknown = False
    for number, batch in enumerate(batches):
        if not isinstance(batch, Rest):
            yield batch
        elif number < given:
            yield None
        elif batch.why is None:
            found.append(batch)
        else:
            _warn(loader, batch.why)
            unknown = True
            yield from batch.samples
    real: list[object] = []
    repeated: list[object] = []
    for rest in sorted(found, key=lambda rest: rest.worker):
        if rest.packed:
            samples, rest.packed = pickle.loads(rest.packed), b""
            real += samples[: rest.real]
            repeated += samples[rest.real :]
    for number, samples in enumerate(shard.cut(real, repeated)):
        seed = rng.mix_seeds(cast(Any, batches)._base_seed, epoch, number)
        yield _collated(loader, samples, seed, batches)
    shard.remainder = 0
    if shard.even_batches and not shard.drop_last:
        total = sum(rest.real for rest in found)
        shard.remainder = -1 if unknown else total % shard.round_size


def _collated(
    loader: DataLoader[object], samples: list[object], seed: int, iterator: Any
) -> object:
    """Return the batch of `samples`, made as by a further worker with random draws of its own."""
    with rng.preserved(device=False):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)
        collate: Callable[..., object] = loader.collate_fn
        batch = collate(samples if loader.batch_size is not None else samples[0])
    return pin_memory(batch, iterator._pin_memory_device) if iterator._pin_memory else batch


def _warn(loader: DataLoader[object], why: str) -> None:
    problem = Problem(
        f"num_workers={loader.num_workers} with samples that cannot be pickled ({why})",
        "what the workers have left at their ends is joined in this process; of such samples "
        "the last round of each worker is completed with repeated ones, or dropped",
        "Let the data set yield tensors, arrays, numbers and text (decode there, not in "
        "collate_fn), or set num_workers=1.",
    )
    warnings.warn(str(problem), stacklevel=2)


class _Collate:
    """The caller's `collate_fn`, around which a `Rest` passes as it is.

    One whose samples cannot be pickled becomes batches in the worker.
    """

    def __init__(
        self, users: Callable[..., object], shard: IterableDatasetShard, batched: bool
    ) -> None:
        self.users = users
        self.shard = shard
        self.batched = batched

    def __call__(self, samples: object) -> object:
        first = samples[0] if type(samples) is list and samples else samples
        if not isinstance(first, Rest):
            return self.users(samples)
        if first.samples:
            try:
                first.packed, first.samples = _packed(first.samples), []
            except Exception as error:  # whatever a sample raises
                first.why = f"{type(error).__name__}: {error}"
                parts = self.shard.cut(first.samples[: first.real], first.samples[first.real :])
                first.samples = [self.users(part if self.batched else part[0]) for part in parts]
        return first


def _packed(samples: list[object]) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
    pickler.dump(samples)
    return file.getvalue()


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how to pickle a tensor: of one that is part of a larger one, only this part."""
    plain = tensor.layout is torch.strided and not tensor.requires_grad
    if plain and tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced
