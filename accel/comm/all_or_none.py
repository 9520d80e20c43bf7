"""Phases that all ranks go through together: a failure on one raises on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from os import PathLike, fspath
from pathlib import Path

from accel.comm.base import Communicator
from accel.machine.errors import CheckpointError, DiskFullError


@contextlib.contextmanager
def together(comm: Communicator, what: str) -> Iterator[None]:
    """Run a phase; if it failed on any rank, raise `CheckpointError` on all: ranks and errors."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    message = None if own is None else f"{_kind(own)}{own}"
    answers = comm.all_gather_object((message, isinstance(own, DiskFullError)))
    failed = {rank: text for rank, (text, _) in enumerate(answers) if text is not None}
    if not failed:
        return
    if comm.world_size == 1:
        if isinstance(own, CheckpointError):
            raise own
        raise CheckpointError(f"{what} failed: {message}") from own
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    kind = DiskFullError if any(full for _, full in answers) else CheckpointError
    raise kind(f"{what} failed on {len(failed)} of {comm.world_size} ranks. {listed}") from own


def _kind(error: Exception) -> str:
    return "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "


def decided(
    comm: Communicator, decide: Callable[[], str | PathLike[str] | None], what: str
) -> Path | None:
    """Return what rank 0 decides; the disks of other ranks may lag behind."""
    answer: list[str | None] = [None]
    with together(comm, what):
        if comm.rank == 0:
            path = decide()
            answer = [None if path is None else fspath(path)]
    (text,) = comm.broadcast_objects(answer)
    return None if text is None else Path(text)
