"""Streams that ranks do not see alike: sharded by rank in code of the caller's, or shuffled apart.

`prepare` gives each rank other positions of one stream. Where the ranks' streams differ already,
some samples are never read, or read twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel.comm.base import Communicator
from accel.data.iterable import IterableDatasetShard, codes_within, held_by
from accel.data.sampler_draws import process_states
from accel.errors import ConfigError, Problem

_SAMPLES, _LEAVES = 32, 8  # of a first round, that are compared
_BYTES = 1 << 14  # of a leaf
_ENTRIES = 1 << 17  # of a list that a data set holds
_DEPTH = 4  # data sets and stages around each other
_LOOKS = 32  # batches of a pass at which ranks look for the others' first rounds
_RANKS = {"rank", "getrank", "processindex", "globalrank", "dprank", "nodeid"}
_SIZES = {"worldsize", "getworldsize", "numprocesses", "numreplicas", "dpsize", "numranks", "world"}
_SHARDING = {"splitbetweenprocesses", "splitbynode", "splitdatasetbynode"}
# How many streams were prepared for a communicator.
_PREPARED: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def declared_alike(dataset: Any) -> bool:
    """Tell whether a data set says, by `same_on_every_rank`, that nothing is to be checked."""
    return bool(getattr(dataset, "same_on_every_rank", False))


# -- what the main process reads for all ---------------------------------------------------------


def check_dispatched(comm: Communicator, dataset: Any) -> None:
    """Warn of a stream that the main process reads for all, and that shards by rank itself.

    In one collective; nothing is read of the stream.

    Args:
        comm: how this process talks to the others.
        dataset: the stream.

    Raises:
        ConfigError: if it is a data set of Hugging Face that is split by node.
    """
    if comm.world_size == 1:
        return
    check_split(dataset)
    alike = declared_alike(dataset)
    found = comm.all_gather_object({} if alike else _lists(dataset))
    name = _lists_apart(found)
    what = f"whose `{name}` differs between ranks" if name else None
    if what is None and not alike and shards_by_rank(dataset):
        what = "whose code asks for the rank and the number of processes"
    if what is not None and not alike:
        warnings.warn(
            str(
                Problem(
                    f"the iterable data set {type(dataset).__name__}, {what}",
                    "the main process reads it for all ranks, so what it leaves to the others is "
                    "never read",
                    "Let it yield the whole stream, or leave the loader of a stream that shards by "
                    "itself out of `prepare`. Set `same_on_every_rank = True` on the data set if "
                    "the main process reads all of it.",
                )
            ),
            stacklevel=4,
        )


def check_split(dataset: Any) -> None:
    """Refuse a data set of Hugging Face that `split_dataset_by_node` has cut.

    Raises:
        ConfigError: if it is.
    """
    for part in _streams(dataset, _DEPTH):
        cut: Any = getattr(part, "_distributed", None)
        size = getattr(cut, "world_size", None)
        if isinstance(size, int) and size > 1:
            raise ConfigError(
                Problem(
                    f"an iterable data set that is split by node already (rank {cut.rank} of "
                    f"{size})",
                    "`prepare` shards the stream, and would shard it again",
                    "Leave `split_dataset_by_node` out, or leave the loader out of `prepare`.",
                )
            )


def shards_by_rank(dataset: Any) -> bool:
    """Tell whether an iterable data set seems to share its samples out by rank.

    It does if functions of it name both a rank and a number of processes, unless an attribute of
    that name says that there is one process.
    """
    for part in _streams(dataset, _DEPTH):
        sizes = [v for k, v in _attributes(part).items() if _plain_name(k) in _SIZES]
        if sizes and not any(isinstance(size, int) and size > 1 for size in sizes):
            continue
        if hasattr(part, "_distributed"):  # of Hugging Face: decided by its value
            continue
        if any(_names_both(code) for code in _codes(part)):
            return True
    return False


def _streams(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield a data set, and the data sets, stages and functions that it is made of."""
    yield dataset
    if depth > 0 and not isinstance(dataset, FunctionType):
        for part in held_by(dataset):
            yield from _streams(part, depth - 1)


def _attributes(value: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(value, "__dict__", {})
    return found


def _codes(value: Any) -> list[CodeType]:
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
    for part in codes_within(code):
        yield from (part.co_name, *part.co_names, *part.co_varnames, *part.co_freevars)
        for constant in part.co_consts:
            if isinstance(constant, str) and constant.isupper():  # os.environ["RANK"]
                yield constant


def _plain_name(name: str) -> str:
    return name.replace("_", "").lower()


def _lists(dataset: Any) -> dict[str, str]:
    """Return digests of the lists of plain values that a data set holds, whatever their order."""
    found = {}
    for level, part in enumerate(_streams(dataset, _DEPTH)):
        if isinstance(part, IterableDataset):
            for name, value in _attributes(part).items():
                entries = _entries(value)
                if entries:
                    total = sum(_hash(repr(entry).encode()) for entry in entries) % (1 << 64)
                    found[f"{name}" if level == 0 else f"{type(part).__name__}.{name}"] = str(total)
    return found


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if value.ndim != 1 or len(value) > _ENTRIES or _is_floating(value):  # drawn, not shared out
            return []
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)) or len(value) > _ENTRIES:
        return []
    plain = (str, int, bytes, os.PathLike)
    return list(value) if all(isinstance(entry, plain) for entry in value) else []


def _lists_apart(found: Sequence[dict[str, str]]) -> str | None:
    """Return the name of a list that ranks hold with other entries than the main process."""
    for name, digest in found[0].items():
        if any(facts.get(name, digest) != digest for facts in found[1:]):
            return name
    return None


# -- what every rank reads -----------------------------------------------------------------------


def first_round(comm: Communicator, loader: Any) -> FirstRound | None:
    """Return what takes note of the samples that a stream yields first, None if nothing is to.

    Warns of a stream that shards by rank in its own code; nothing is exchanged.

    Args:
        comm: how this process talks to the others.
        loader: the caller's, of a stream that each rank reads.

    Raises:
        ConfigError: if it is a data set of Hugging Face that is split by node.
    """
    if comm.world_size == 1:
        return None
    check_split(loader.dataset)
    _PREPARED[comm] = number = _PREPARED.get(comm, 0) + 1
    if declared_alike(loader.dataset):
        return None
    if shards_by_rank(loader.dataset):
        what = "its code asks for the rank and the number of processes"
        warnings.warn(str(_streams_apart(loader.dataset, what)), stacklevel=4)
        return None
    found = FirstRound(key=f"stream/{number}")
    if loader.num_workers > 0:
        found.table.share_memory_()
    return found


@dataclasses.dataclass
class FirstRound:
    """Digests of the samples of a stream's first round, which worker processes write, too.

    Attributes:
        key: under which the ranks post their tables.
        table: [2 + samples * leaves] in shared memory: the number of samples + 1 (0: nothing is
            known), whether the process's random generators were drawn from and all leaves are one
            floating tensor, and a digest of each leaf.
    """

    key: str = ""
    table: torch.Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(2 + _SAMPLES * _LEAVES, dtype=torch.int64)
    )
    _before: Any = None
    _is_posted: bool = False

    def begin(self) -> None:
        """Note the start of a pass."""
        if not int(self.table[0]):
            self._before = process_states()

    def note(self, samples: Sequence[Any]) -> None:
        """Note the samples of a round, none where the stream is empty.

        Args:
            samples: as the stream gave them.
        """
        worker = get_worker_info()
        if int(self.table[0]) or (worker is not None and worker.id > 0):
            return
        leaves = [list(_leaves(sample)) for sample in samples[:_SAMPLES]]
        lone = all(len(parts) == 1 and _is_floating(parts[0]) for parts in leaves)
        digests = [0] * (_SAMPLES * _LEAVES)
        for row, parts in enumerate(leaves):
            for column, part in enumerate(parts[:_LEAVES]):
                digests[row * _LEAVES + column] = _signed(_hash(_bytes_of(part)))
        random_alone = lone and bool(samples) and self._before != process_states()
        table = [len(samples) + 1, int(random_alone), *digests]
        self.table.copy_(torch.tensor(table, dtype=torch.int64))

    def difference(self, comm: Communicator) -> str | None:
        """Return how the ranks' first rounds differ; "" if they do not; None: not known so far.

        It waits for nobody: a rank may read a batch that others do not.

        Args:
            comm: how this process talks to the others.
        """
        if comm.closed:
            return None
        if not self._is_posted:
            comm.post(self.key, json.dumps(self.table.tolist()))
            self._is_posted = True
        found = comm.posted(self.key)
        if found is None:
            return None
        return difference([json.loads(one) for one in found]) or ""


def compared(
    shard: IterableDatasetShard, batches: Iterator[Any], comm: Communicator
) -> Iterator[Any]:
    """Yield `batches`, and warn once if the ranks' streams began with different samples.

    Args:
        shard: this rank's part of the stream.
        batches: of this rank.
        comm: how this process talks to the others.
    """
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
        warnings.warn(str(_streams_apart(shard.dataset, found)), stacklevel=5)


def difference(tables: Sequence[list[int]]) -> str | None:
    """Return how the first rounds of the ranks' streams differ, None where they may be one stream.

    Equal samples at more than a quarter of the positions, or a leaf (a label, an index) that agrees
    at all of them and varies, show one stream, which is augmented at random. Lone floating tensors
    may be augmented, too, if random numbers were drawn, and no sample comes at several positions.

    Args:
        tables: by rank, as `FirstRound` writes them.
    """
    counts = [table[0] - 1 for table in tables]
    if any(count < 0 for count in counts):
        return None
    if len(set(counts)) > 1:
        return f"the first round has {' and '.join(map(str, counts))} samples on the ranks"
    rows = [_rows(table) for table in tables]
    positions = list(zip(*rows, strict=True))
    same = sum(len(set(ranks)) == 1 for ranks in positions)
    if same * 4 > len(positions) or not positions:
        return None
    columns = [list(zip(*rank, strict=True)) for rank in rows]
    for first, *others in zip(*columns, strict=True):
        if len(set(first)) > 1 and all(first == other for other in others):
            return None
    if any(table[1] for table in tables) and not any(_moved(rows[0], other) for other in rows[1:]):
        return None
    differing = len(positions) - same
    return f"{differing} of the {len(positions)} samples compared at first differ between ranks"


def _moved(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether a sample that differs from the other rank's comes there at another position."""
    known = set(others)
    return any(mine != other and mine in known for mine, other in zip(rows, others, strict=True))


def _rows(table: list[int]) -> list[tuple[int, ...]]:
    count = min(table[0] - 1, _SAMPLES)
    cells = table[2:]
    return [tuple(cells[i * _LEAVES : (i + 1) * _LEAVES]) for i in range(count)]


def _streams_apart(dataset: Any, told: str) -> Problem:
    return Problem(
        f"the iterable data set {type(dataset).__name__}: {told}",
        "`prepare` gives each rank other samples of one stream; of streams that are sharded by "
        "rank already, or shuffled in another order on each rank, it drops samples that no rank "
        "reads",
        "Let every rank yield the whole stream in one order (seed its shuffle alike), or set "
        "dispatch_batches=True, so that the main process reads for all; leave the loader of a "
        "stream that shards by itself out of `prepare`. Where ranks may differ (augmentations, "
        "random samples without end), set `same_on_every_rank = True` on the data set.",
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(part, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for part in value
    ):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, tuple):
        yield from value
    else:
        yield value


def _is_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, (float, np.floating)) or (
        isinstance(value, np.ndarray) and value.dtype.kind == "f"
    )


def _bytes_of(value: Any) -> bytes:
    """Return bytes that are the same for equal values in all processes; else of the type alone."""
    if isinstance(value, torch.Tensor):
        try:
            flat = value.detach().reshape(-1)[:_BYTES].cpu()
            value = flat.float().numpy() if flat.dtype is torch.bfloat16 else flat.numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized, meta
            return f"{type(value)}{tuple(value.shape)}".encode()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
        return np.asarray(value).reshape(-1)[:_BYTES].tobytes()
    plain = (bool, int, float, complex, str, bytes, type(None))
    if isinstance(value, plain):
        return repr(value).encode()[:_BYTES]
    if isinstance(value, list) and all(isinstance(part, plain) for part in value[:_BYTES]):
        return repr(value[:_BYTES]).encode()
    return f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
