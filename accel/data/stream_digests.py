"""Digests of the first samples that each rank reads of a stream, and how those of ranks differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import get_worker_info

from accel.comm.base import Communicator

_SAMPLES, _LEAVES = 32, 8  # of a first round, that are compared
_BYTES = 1 << 14  # of a leaf


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
    _before: list[object] | None = None
    _is_posted: bool = False

    def begin(self) -> None:
        """Note the start of a pass."""
        from accel.data.independent_draws import process_states

        if not int(self.table[0]):
            self._before = process_states()

    def note(self, samples: Sequence[object]) -> None:
        """Note the samples of a round, none where the stream is empty."""
        from accel.data.independent_draws import process_states

        worker = get_worker_info()
        if int(self.table[0]) or (worker is not None and worker.id > 0):
            return
        leaves = [list(_leaves(sample)) for sample in samples[:_SAMPLES]]
        lone = all(len(parts) == 1 and is_floating(parts[0]) for parts in leaves)
        digests = [0] * (_SAMPLES * _LEAVES)
        for row, parts in enumerate(leaves):
            for column, part in enumerate(parts[:_LEAVES]):
                digests[row * _LEAVES + column] = _signed(digest(_bytes_of(part)))
        random_alone = lone and bool(samples) and self._before != process_states()
        table = [len(samples) + 1, int(random_alone), *digests]
        self.table.copy_(torch.tensor(table, dtype=torch.int64))

    def difference(self, comm: Communicator) -> str | None:
        """Return how the ranks' first rounds differ; "" if they do not; None: not known so far.

        It waits for nobody: a rank may read a batch that others do not.
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


def difference(tables: Sequence[list[int]]) -> str | None:
    """Return how the ranks' `tables` of first rounds differ, None where they may be of one stream.

    Equal samples at more than a quarter of the positions, or a leaf (a label, an index) that agrees
    at all of them and varies, show one stream, which is augmented at random. Lone floating tensors
    may be augmented, too, if random numbers were drawn, and no sample comes at several positions.
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


def _moved(rows: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether a sample that differs from the other rank's comes there at another place."""
    known = set(others)
    return any(mine != other and mine in known for mine, other in zip(rows, others, strict=True))


def _rows(table: list[int]) -> list[tuple[int, ...]]:
    count = min(table[0] - 1, _SAMPLES)
    cells = table[2:]
    return [tuple(cells[i * _LEAVES : (i + 1) * _LEAVES]) for i in range(count)]


def _leaves(value: object) -> Iterator[object]:
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


def is_floating(value: object) -> bool:
    """Return whether `value` is a floating-point number, tensor or array."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, (float, np.floating)) or (
        isinstance(value, np.ndarray) and value.dtype.kind == "f"
    )


def _bytes_of(value: object) -> bytes:
    """Return bytes that are the same for equal values in all processes; else of the type only."""
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


def digest(data: bytes) -> int:
    """Return a number in [0, 2**64) that is the same for equal bytes in all processes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
