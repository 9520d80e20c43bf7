"""The rounds that one process reads for all: batches joined, padded at the end, and sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel.comm.base import Communicator
from accel.comm.ops import broadcast, send_to_device
from accel.data.batch_layout import (
    Path,
    SampleLayout,
    Samples,
    is_storable,
    warn_of_lost_samples,
)
from accel.machine.errors import StateError
from accel.machine.tree import flatten, iterate, recursively_apply


class RoundReader:
    """Makes rounds of `full_size` samples out of `per_round` batches of a pass each.

    Args:
        full_size: None where batches have no known size, so that rounds may vary.
        num_processes: with `even_batches`, the last round is completed to a multiple of it.
        drop_last: whether a round of too few batches is dropped.
    """

    def __init__(
        self,
        layout: SampleLayout,
        per_round: int,
        full_size: int | None,
        num_processes: int,
        even_batches: bool,
        drop_last: bool,
    ) -> None:
        self.layout = layout
        self.per_round = per_round
        self.full_size = full_size
        self.num_processes = num_processes
        self.completes = even_batches and num_processes > 1
        self.drop_last = drop_last
        self._head: dict[Path, Samples] | None = None  # the first samples of the pass
        # Samples of each round; 0: varying; None: not known yet.
        self._full: int | None = 0 if full_size is None else None
        self._rest: list[object] = []  # read, and not given yet

    def read(self, batches: Iterator[object], skip: int = 0) -> Iterator[tuple[object, int, int]]:
        """Yield the batch of each round after `skip`, its size, and how many samples are real."""
        layout = self.layout
        for number, batch in enumerate(self._joined(batches)):
            size = real = layout.size_of(batch)
            if self._head is None and self.completes:
                self._head = layout.leaves(batch, slice(0, self.num_processes))
            if number < skip:
                continue
            if self._head is not None:
                batch, size = layout.complete(batch, size, self._head, self.num_processes)
            yield batch, size, real

    def _joined(self, batches: Iterator[object]) -> Iterator[object]:
        """Join the batches of each round; a short one in between (a worker's last) is filled."""
        layout = self.layout
        while group := list(itertools.islice(batches, self.per_round)):
            for single in group:
                layout.read(single)
            batch = layout.join([*self._rest, *group])
            size, self._rest = layout.size_of(batch), []
            if self._full is None:
                self._full = size if size == self.full_size else 0
            full = self._full
            if full in (0, size):
                if not self.drop_last or len(group) == self.per_round:
                    yield batch
                continue
            end = size - size % full
            self._rest = [layout.cut(batch, slice(end, size))] if end < size else []
            for start in range(0, end, full):
                yield layout.cut(batch, slice(start, start + full))
        if self._rest and not self.drop_last:
            rest, self._rest = self._rest[0], []
            yield rest

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed pass continues after the round in hand."""
        head = self._head
        if head is not None and not is_storable(list(head.values())):
            head = None  # a checkpoint holds no objects of other classes
        return {
            "layout": self.layout.state_dict(),
            "head": None if head is None else list(head.items()),
            "full": self._full,
            "rest": list(self._rest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.layout.load_state_dict(state["layout"])
        self._rest = list(state["rest"])
        self._full = state["full"]
        if state["head"] is not None:
            self._head = {tuple(path): leaf for path, leaf in state["head"]}
        elif self.completes:
            warn_of_lost_samples()


@dataclass(frozen=True)
class Round:
    """The samples that all processes together compute on at the same time.

    Attributes:
        size: how many samples, those that only complete the round included.
        real: how many samples are no repetitions.
        following: how many samples the next round has; None if this is the last.
        paths: the parts of the batch that have one entry per sample.
    """

    batch: Any
    size: int
    real: int
    following: int | None
    paths: tuple[Path, ...]


def send_round(comm: Communicator, rounds: Iterator[Round], device: torch.device) -> Round | None:
    """Read the next round on the main process and give it to the others.

    A failure to read is sent to them, so that none waits.
    """
    try:
        found = next(rounds, None)
    except Exception as error:
        comm.broadcast_objects([f"{type(error).__name__}: {error}"])
        raise
    if found is None:
        comm.broadcast_objects([None])
        return None
    batch = send_to_device(found.batch, device)
    without_data = recursively_apply(lambda tensor: tensor.to("meta"), batch)
    comm.broadcast_objects([replace(found, batch=without_data)])
    broadcast(list(iterate(batch)))
    return replace(found, batch=batch)


def receive_round(comm: Communicator, device: torch.device) -> Round | None:
    """Take the next round from the main process; `StateError` if it failed to read it."""
    (header,) = comm.broadcast_objects([None])
    if header is None:
        return None
    if isinstance(header, str):
        raise StateError(f"The main process failed to read a batch for all: {header}")
    tensors, rebuild = flatten(header.batch)
    empty = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in tensors]
    return replace(header, batch=rebuild(broadcast(empty)))
