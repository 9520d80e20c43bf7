"""Streams that ranks do not see alike: sharded by rank in code of the caller's, or shuffled apart.

`prepare` gives each rank other positions of one stream. Where the ranks' streams differ already,
some samples are never read, or read twice.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from accel.comm.base import Communicator
from accel.data.iterable import IterableDatasetShard
from accel.data.stream_digests import FirstRound, digest, is_floating
from accel.machine.errors import ConfigError, Problem

_ENTRIES = 1 << 17  # of a list that a data set holds
_DEPTH = 4  # data sets and stages around each other
_MANY = 100  # a pipeline has fewer stages; a longer list is data
_LOOKS = 32  # batches of a pass at which ranks look for the others' first rounds
_RANKS = {"rank", "getrank", "processindex", "globalrank", "dprank", "nodeid"}
_SIZES = {"worldsize", "getworldsize", "numprocesses", "numreplicas", "dpsize", "numranks", "world"}
_SHARD_COUNTS = ("num_shards", "n_shards")  # of Hugging Face data sets
_SHARDING = {"splitbetweenprocesses", "splitbynode", "splitdatasetbynode"}
# How many streams were prepared for a communicator.
_PREPARED: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def declared_alike(dataset: object) -> bool:
    """Return whether a data set declares by `same_on_every_rank` that it needs no check."""
    return bool(getattr(dataset, "same_on_every_rank", False))


# -- streams that the main process reads ---------------------------------------------------------


def check_dispatched(comm: Communicator, dataset: object) -> None:
    """Warn of a stream that the main process reads for all, and that shards by rank itself.

    In one collective; nothing is read of the stream. Raise `ConfigError` if it is a data set of
    Hugging Face that is split by node.
    """
    if comm.world_size == 1:
        return
    check_split(dataset)
    alike = declared_alike(dataset)
    found = comm.all_gather_object({} if alike else _lists(dataset))
    # A list that a rank holds with other entries than the main process.
    differing = (n for n, own in found[0].items() if any(r.get(n, own) != own for r in found[1:]))
    name = next(differing, None)
    what = f"whose `{name}` differs between ranks" if name else None
    if what is None and not alike and shards_by_rank(dataset):
        what = "whose code uses the rank and the number of processes"
    if what is not None and not alike:
        problem = Problem(
            f"the iterable data set {type(dataset).__name__}, {what}",
            "the main process reads it for all ranks, so that the samples of the others are never "
            "read",
            "Let it yield the full stream, or leave the loader of a stream that shards itself out "
            "of `prepare`. Set `same_on_every_rank = True` on the data set if the main process "
            "reads all of it.",
        )
        warnings.warn(str(problem), stacklevel=5)


def check_split(dataset: object) -> None:
    """Raise `ConfigError` for a data set of Hugging Face that `split_dataset_by_node` has cut."""
    for part in _streams(dataset, _DEPTH):
        cut: Any = getattr(part, "_distributed", None)
        size = getattr(cut, "world_size", None)
        if isinstance(size, int) and size > 1:
            raise ConfigError.of(
                f"an iterable data set that is split by node already (rank {cut.rank} of {size})",
                "`prepare` shards the stream, and would shard it again",
                "Leave `split_dataset_by_node` out, or leave the loader out of `prepare`.",
            )


def shards_by_rank(dataset: object) -> bool:
    """Return whether an iterable data set seems to shard its samples by rank.

    It does if functions of it name both a rank and a number of processes, unless an attribute of
    that name says that there is one process.
    """
    for part in _streams(dataset, _DEPTH):
        sizes = [v for k, v in getattr(part, "__dict__", {}).items() if _plain_name(k) in _SIZES]
        if sizes and not any(isinstance(size, int) and size > 1 for size in sizes):
            continue
        if hasattr(part, "_distributed"):  # of Hugging Face: decided by its value
            continue
        if any(_names_both(code) for code in _codes(part)):
            return True
    return False


def _streams(dataset: object, depth: int) -> Iterator[object]:
    """Yield a data set, and the data sets, stages and functions that it is made of."""
    yield dataset
    if depth > 0 and not isinstance(dataset, FunctionType):
        for part in _held_by(dataset):
            yield from _streams(part, depth - 1)


def _held_by(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        parts = list(value[:_MANY])
    elif isinstance(value, Mapping):
        parts = list(itertools.islice(value.values(), _MANY))
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return [
        part
        for part in parts
        if callable(part)
        or isinstance(part, (list, tuple, Mapping))
        or (hasattr(part, "__iter__") and hasattr(part, "__dict__"))
    ]


def _codes(value: object) -> list[CodeType]:
    """Return the code of a generator function, or of the methods of an iterable's classes."""
    if isinstance(value, FunctionType):
        return [value.__code__] if value.__code__.co_flags & 0x20 else []
    if not hasattr(type(value), "__iter__") or isinstance(value, (list, tuple, Mapping)):
        return []
    kinds = [kind for kind in type(value).__mro__ if not kind.__module__.startswith("torch.")]
    methods = [item for kind in kinds[:-1] for item in vars(kind).values()]
    return [m.__code__ for m in methods if isinstance(m, FunctionType)]


def _names_both(code: CodeType) -> bool:
    names = {_plain_name(name) for name in _names(code)}
    return bool(names & _SHARDING) or bool(names & _RANKS and names & _SIZES)


def _names(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function that it defines
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isupper():  # os.environ["RANK"]
            yield constant


def _plain_name(name: str) -> str:
    return name.replace("_", "").lower()


def _lists(dataset: object) -> dict[str, str]:
    """Return digests of the lists of plain values that a data set holds, whatever their order."""
    found = {}
    for level, part in enumerate(_streams(dataset, _DEPTH)):
        if isinstance(part, IterableDataset):
            for name, value in getattr(part, "__dict__", {}).items():
                if entries := _entries(value):
                    total = sum(digest(repr(entry).encode()) for entry in entries) % (1 << 64)
                    found[name if level == 0 else f"{type(part).__name__}.{name}"] = str(total)
    return found


def _entries(value: object) -> list[object]:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if value.ndim != 1 or len(value) > _ENTRIES or is_floating(value):  # drawn, not sharded
            return []
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)) or len(value) > _ENTRIES:
        return []
    plain = (str, int, bytes, os.PathLike)
    return list(value) if all(isinstance(entry, plain) for entry in value) else []


# -- streams that loader workers read ------------------------------------------------------------


def worker_problems(
    dataset: object, num_workers: int, worker_init_fn: object = None
) -> list[Problem]:
    """Return what is wrong with reading an iterable data set in `num_workers` processes.

    Each worker iterates over a copy of its own, so a data set that does not divide its samples by
    `torch.utils.data.get_worker_info` gives each of them `num_workers` times. One that declares
    nothing is warned of. A `worker_init_fn` may divide them, too.
    """
    if num_workers < 2 or worker_init_fn is not None:
        return []
    declared = shards_by_worker(dataset)
    value = f"num_workers={num_workers} with the iterable data set {type(dataset).__name__}"
    if declared is None:
        rule = (
            "it does not declare `shards_by_worker`: unless its `__iter__` divides the samples by "
            f"`torch.utils.data.get_worker_info()`, each of them comes {num_workers} times"
        )
        remedy = "Set `shards_by_worker = True` on it if it divides them, else num_workers=1."
        warnings.warn(str(Problem(value, rule, remedy)), stacklevel=4)
    if declared is not False:
        return []
    rule = f"it declares `shards_by_worker = False`, so each sample would come {num_workers} times"
    remedy = "Set num_workers=1, or divide the samples by `torch.utils.data.get_worker_info()`."
    return [Problem(value, rule, remedy)]


def shards_by_worker(dataset: object, depth: int = _DEPTH) -> bool | None:
    """Return whether an iterable data set declares that it divides its samples by loader worker.

    It does by an attribute `shards_by_worker`. Data pipes of torch are sharded by torch, data sets
    that count their shards (`num_shards` of Hugging Face) by themselves. A data set around others
    that declares nothing itself divides its samples if all of them do. None: it is not known.
    """
    declared = getattr(dataset, "shards_by_worker", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, IterDataPipe) or any(hasattr(dataset, name) for name in _SHARD_COUNTS):
        return True
    found = [shards_by_worker(part, depth - 1) for part in _sources(dataset, depth)]
    if False in found:
        return False
    return True if found and None not in found else None


def _sources(value: object, depth: int) -> Iterator[object]:
    for part in _held_by(value) if depth > 0 else ():
        if isinstance(part, (list, tuple, Mapping)):
            yield from _sources(part, depth - 1)
        elif isinstance(part, IterableDataset) or any(
            hasattr(part, name) for name in ("shards_by_worker", *_SHARD_COUNTS)
        ):
            yield part


# -- streams that every rank reads ---------------------------------------------------------------


def first_round(comm: Communicator, loader: DataLoader[object]) -> FirstRound | None:
    """Return what takes note of the samples that a stream yields first, None if nothing is to.

    Warns and raises as `check_dispatched` does, but nothing is exchanged.
    """
    if comm.world_size == 1:
        return None
    check_split(loader.dataset)
    _PREPARED[comm] = number = _PREPARED.get(comm, 0) + 1
    if declared_alike(loader.dataset):
        return None
    if shards_by_rank(loader.dataset):
        what = "its code uses the rank and the number of processes"
        warnings.warn(str(_differing_streams(loader.dataset, what)), stacklevel=5)
        return None
    found = FirstRound(key=f"stream/{number}")
    if loader.num_workers > 0:
        found.table.share_memory_()
    return found


def compared(
    shard: IterableDatasetShard, batches: Iterator[object], comm: Communicator
) -> Iterator[object]:
    """Yield `batches`, and warn once if the ranks' streams began with different samples."""
    for number, batch in enumerate(batches):
        if number < _LOOKS:
            _compare(shard, comm)
        yield batch
    _compare(shard, comm)


def _compare(shard: IterableDatasetShard, comm: Communicator) -> None:
    found = None if shard.first_round is None else shard.first_round.difference(comm)
    if found is not None:
        shard.first_round = None
    if found:
        warnings.warn(str(_differing_streams(shard.dataset, found)), stacklevel=5)


def _differing_streams(dataset: object, how: str) -> Problem:
    return Problem(
        f"the iterable data set {type(dataset).__name__}: {how}",
        "`prepare` gives each rank other samples of one stream; of streams that are sharded by "
        "rank already, or shuffled in another order on each rank, it drops samples that no rank "
        "reads",
        "Let every rank yield the full stream in one order (seed its shuffle alike), or set "
        "dispatch_batches=True, so that the main process reads for all; leave the loader of a "
        "stream that shards itself out of `prepare`. Where ranks may differ (augmentations, "
        "random samples without end), set `same_on_every_rank = True` on the data set.",
    )
