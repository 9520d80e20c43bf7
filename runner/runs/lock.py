"""One command at a time trains in a run directory. Free of torch.

A command locks ``<run_dir>/.lock`` before it changes anything and holds it to its end: the parent
of the workers, or rank 0 of those that torchrun has started. A second command is refused, with the
holder's process, host and command. Reading a run (`eval`, `predict`, `runner.load`) needs no lock.

These are record locks of an open file. The kernel drops them when the last process with that open
file ends, however it ends. A forked child closes it at once, so a lock never outlives its holder.
Others in the process may open and close the file, such as a callback that copies the run directory.
(Where a system has locks of a process alone, that drops them; so this module opens a locked file
once.) Workers lock a second byte of the file (shared): where only the parent was killed, the next
command waits until they have ended. Network file systems hold the locks between nodes as far as the
mount offers them; where it offers none, that is said once, and the run starts unprotected.
Source: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import shlex
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from accel.machine import passwords
from accel.machine.errors import ConfigError, Problem
from runner.recipe import paths

logger = logging.getLogger(__name__)

FILE = ".lock"
COMMAND, WORKERS = 0, 1  # bytes of the file
TAKEN = (errno.EAGAIN, errno.EACCES)
NOT_OFFERED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# How long a lock may be held by a process that only tests it.
LOOK_SECONDS = 0.2
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


# Files that this process has locked, with its id, which differs in a forked child.
_HELD: dict[str, tuple[int, Holder]] = {}
_GUARD = threading.Lock()
_OPEN: set[int] = set()  # descriptors of this process


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory in the context.

    Raises:
        ConfigError: if another command holds it, or the directory cannot be written.
    """
    path = os.path.realpath(run_dir / FILE)
    me = _this_process()
    with _GUARD:
        if (other := _held_here(path)) is not None:
            raise _refusal(run_dir, other)
        _HELD[path] = os.getpid(), me
    try:
        descriptor = _open_own(path, run_dir)
        try:
            _acquire(descriptor, run_dir)
            _write_holder(descriptor, me, run_dir)
            yield
        finally:
            _close(descriptor)
    finally:
        with _GUARD:
            _HELD.pop(path, None)


def holder(run_dir: Path) -> Holder | None:
    """Return who holds the lock of a run directory; None: nobody. Nothing is written."""
    path = os.path.realpath(run_dir / FILE)
    with _GUARD:
        if (own := _held_here(path)) is not None:
            return own
        try:
            descriptor = _open(path)
        except OSError:  # never locked, or not ours to write: not ours to train in, either
            return None
        try:
            return None if _try_lock(descriptor, COMMAND, False, 0.0) else _read_holder(descriptor)
        except OSError as error:
            logger.debug("%s: %s", path, error)  # locks are not offered: nobody holds one
            return None
        finally:
            _close(descriptor)


@contextlib.contextmanager
def shared(run_dir: Path) -> Iterator[None]:
    """Keep other commands out in the context: for each worker of the command that holds the lock.

    The process that holds the lock itself needs no more.
    """
    path = os.path.realpath(run_dir / FILE)
    descriptor = None
    with _GUARD:
        if _held_here(path) is None:
            descriptor = _shared(path)
    try:
        yield
    finally:
        if descriptor is not None:
            with _GUARD:
                _HELD.pop(path, None)
                _close(descriptor)


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the context, once nobody else does.

    Threads of one process must not ask for the same file at the same time.

    Raises:
        OSError: if the file cannot be written, or there are no locks (errno in `NOT_OFFERED`).
    """
    descriptor = _open(path, os.O_CREAT)
    try:
        while not _try_lock(descriptor, COMMAND, True, LOOK_SECONDS):
            logger.debug("%s: waiting for its lock", path)
        yield
    finally:
        _close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file that `waited_for` gives."""
    try:
        descriptor = _open(path)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, COMMAND, False, 0.0)
    except OSError as error:
        logger.debug("%s: %s", path, error)  # locks are not offered: nobody holds one
        return False
    finally:
        _close(descriptor)


def _shared(path: str) -> int | None:
    """Return the file descriptor that holds a worker's lock; None where there is none to have."""
    try:
        descriptor = _open(path, os.O_CREAT)
    except OSError as error:
        logger.warning("%s could not be locked by a worker: %s", path, error)
        return None
    try:
        if _try_lock(descriptor, WORKERS, False, WORKER_SECONDS):
            _HELD[path] = os.getpid(), _this_process()
            return descriptor
    except OSError as error:
        logger.debug("%s: %s", path, error)  # locks are not offered: who holds it has said so
    _close(descriptor)
    return None


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


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_all)


def _open_own(path: str, run_dir: Path) -> int:
    try:
        return _open(path, os.O_CREAT)
    except OSError as error:
        remedy = "Make it writable, or start a new run elsewhere."
        raise _unwritable(run_dir, error, remedy) from error


def _write_holder(descriptor: int, me: Holder, run_dir: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(asdict(me))}\n".encode(errors="replace"), 0)
    except OSError as error:  # a full disk
        raise _unwritable(run_dir, error, "Make room there, or write elsewhere.") from error


def _unwritable(run_dir: Path, error: OSError, remedy: str) -> ConfigError:
    rule = f"a run is written in its directory, and that failed ({paths.failure(error)})"
    return ConfigError(Problem(str(run_dir), rule, remedy))


def _held_here(path: str) -> Holder | None:
    """Return as whom this process has locked a file."""
    pid, me = _HELD.get(path, (0, None))
    return me if pid == os.getpid() else None


def _acquire(descriptor: int, run_dir: Path) -> None:
    try:
        if not _try_lock(descriptor, COMMAND, True, LOOK_SECONDS):
            raise _refusal(run_dir, _read_holder(descriptor))
        if not _try_lock(descriptor, WORKERS, True, WORKER_SECONDS):
            rule = f"workers of an earlier command have not ended ({_read_holder(descriptor)})"
            raise HeldError.of(str(run_dir), rule, "Wait for them, or end them.")
        _lock(descriptor, WORKERS, "LOCK_UN")  # for its own workers
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        logger.warning(
            "%s: its file system offers no locks (%s). Nothing keeps a second command from "
            "training in it at the same time.",
            run_dir,
            error,
        )


def _try_lock(descriptor: int, byte: int, exclusive: bool, seconds: float) -> bool:
    """Return whether a lock could be taken in time; OSError: none are offered here."""
    deadline, kind = time.monotonic() + seconds, "LOCK_EX" if exclusive else "LOCK_SH"
    while True:
        try:
            _lock(descriptor, byte, kind)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def _lock(descriptor: int, byte: int, kind: str) -> None:
    """Set or drop the lock of a byte without waiting; OSError: it is taken, or there are none."""
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOSYS, "no record locks") from error
    if hasattr(fcntl, "F_OFD_SETLK"):  # Linux: a lock of the open file, not of the process
        kinds = {"LOCK_EX": fcntl.F_WRLCK, "LOCK_SH": fcntl.F_RDLCK, "LOCK_UN": fcntl.F_UNLCK}
        asked = struct.pack("hhqqi4x", kinds[kind], os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, asked)
        return
    without_waiting = 0 if kind == "LOCK_UN" else fcntl.LOCK_NB
    fcntl.lockf(descriptor, getattr(fcntl, kind) | without_waiting, 1, byte)


def _this_process() -> Holder:
    command = shlex.join(passwords.shown(sys.orig_argv))  # Hydra is given another line
    return Holder(os.getpid(), platform.node(), command, f"{datetime.now():%Y-%m-%d %H:%M:%S}")


def _read_holder(descriptor: int) -> Holder:
    """Return the holder from the file; an unknown one if it has not written it yet."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Holder()


def _refusal(run_dir: Path, other: Holder) -> ConfigError:
    rule = f"another command trains in it ({other})"
    return HeldError(Problem(str(run_dir), rule, "Wait for its end, or stop it first."))
