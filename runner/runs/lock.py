"""One command at a time trains in a run directory. Free of torch.

A command locks ``<run_dir>/.lock`` before it changes anything and holds it to its end: the parent
of the workers, or rank 0 of those that torchrun has started. A second command is refused, with the
holder's process, host and command. Reading a run (`eval`, `predict`, `runner.load`) needs no lock.

The lock is of the open file (Linux: a record lock, elsewhere `flock`). The kernel drops it when the
last process with that open file ends, however it ends, and a forked child closes the file at once.
On Linux workers lock a second byte (shared): where only the parent was killed, the next command
waits until they have ended. Network file systems hold the locks between nodes as far as the mount
offers them; where it offers none, that is said once, and the run starts unprotected.
Source: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import shlex
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from accel.machine import passwords
from accel.machine.errors import ConfigError
from runner.runs.json_files import writable

logger = logging.getLogger(__name__)

FILE = ".lock"
COMMAND, WORKERS = 0, 1  # bytes of the file
TAKEN = (errno.EAGAIN, errno.EACCES)
NOT_OFFERED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# How long a lock may be held by a process that only tests it.
LOOK_SECONDS = 0.2
# Between looks at a lock that is waited for long.
MOST_SECONDS = 1.0
# How long the workers of a killed parent may take to end.
WORKER_SECONDS = 10.0


@dataclass(frozen=True)
class Holder:
    """Who trains in a run directory; `pid` is the process id on its host, 0: unknown."""

    pid: int = 0
    host: str = "?"
    command: str = "?"
    since: str = "?"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}: {self.command}"


class HeldError(ConfigError):
    """Another command trains in a run directory."""


_OPEN: set[int] = set()  # descriptors of this process


@contextlib.contextmanager
def held(run_dir: Path, seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Hold the lock of a run directory in the context.

    Raises:
        HeldError: if another command holds it for so many seconds.
        ConfigError: if the directory cannot be written.
    """
    with writable(str(run_dir), "Make it writable, or start a new run elsewhere."):
        descriptor = _open(run_dir / FILE, os.O_CREAT)
    try:
        _acquire(descriptor, run_dir, seconds)
        _write_holder(descriptor, run_dir)
        yield
    finally:
        _close(descriptor)


def holder(run_dir: Path) -> Holder | None:
    """Return who holds the lock of a run directory; None: nobody. Nothing is written."""
    try:
        descriptor = _open(run_dir / FILE)
    except OSError:  # never locked, or not ours to write: not ours to train in, either
        return None
    try:
        is_free = _try_lock(descriptor, COMMAND, fcntl.LOCK_SH, 0.0)
        return None if is_free else _read_holder(descriptor)
    except OSError as error:
        logger.debug("%s: %s", run_dir, error)  # locks are not offered: nobody holds one
        return None
    finally:
        _close(descriptor)


@contextlib.contextmanager
def shared(run_dir: Path) -> Iterator[None]:
    """Keep other commands out in the context: for a worker of the command that holds the lock."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = _open(run_dir / FILE, os.O_CREAT)
            stack.callback(_close, descriptor)
            _try_lock(descriptor, WORKERS, fcntl.LOCK_SH, WORKER_SECONDS)
        except OSError as error:
            logger.debug("%s: %s", run_dir, error)  # who holds the lock has said why
        yield


def _open(path: str | Path, flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    _OPEN.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    if descriptor in _OPEN:  # else this process was forked since
        _OPEN.remove(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_close_all)


def _write_holder(descriptor: int, run_dir: Path) -> None:
    command = shlex.join(passwords.shown(sys.orig_argv))  # Hydra is given another line
    since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    me = Holder(os.getpid(), platform.node(), command, since)
    with writable(str(run_dir), "Make room there, or write elsewhere."):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(asdict(me))}\n".encode(errors="replace"), 0)


def _acquire(descriptor: int, run_dir: Path, seconds: float) -> None:
    try:
        if not _try_lock(descriptor, COMMAND, fcntl.LOCK_EX, seconds):
            rule = f"another command trains in it ({_read_holder(descriptor)})"
            raise HeldError.of(str(run_dir), rule, "Wait for its end, or stop it first.")
        if not _try_lock(descriptor, WORKERS, fcntl.LOCK_EX, max(seconds, WORKER_SECONDS)):
            rule = f"workers of an earlier command have not ended ({_read_holder(descriptor)})"
            raise HeldError.of(str(run_dir), rule, "Wait for them, or end them.")
        _lock(descriptor, WORKERS, fcntl.LOCK_UN)  # for its own workers
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        logger.warning(
            "%s: its file system offers no locks (%s). Nothing keeps a second command from "
            "training in it at the same time.",
            run_dir,
            error,
        )


def _try_lock(descriptor: int, byte: int, kind: int, seconds: float) -> bool:
    """Return whether a lock could be taken in time; OSError: none are offered here."""
    begun = time.monotonic()
    while True:
        try:
            _lock(descriptor, byte, kind)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                raise
        waited = time.monotonic() - begun
        if waited >= seconds:
            return False
        time.sleep(min(0.02 + waited / 20, MOST_SECONDS))


def _lock(descriptor: int, byte: int, kind: int) -> None:
    """Set or drop the lock of a byte without waiting; OSError: it is taken, or there are none."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        kinds = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_SH: fcntl.F_RDLCK}
        asked = (kinds.get(kind, fcntl.F_UNLCK), os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", *asked))
    elif byte == COMMAND:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)


def _read_holder(descriptor: int) -> Holder:
    """Return the holder from the file; an unknown one if it has not written it yet."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Holder()
