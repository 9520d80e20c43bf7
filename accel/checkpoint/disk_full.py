"""Errors of a full disk name the folder and the free space there."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.machine.errors import DiskFullError, Problem, text_of

CODES = (errno.ENOSPC, errno.EDQUOT)
# How safetensors and tensorboard pass such an error on.
WORDS = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")
# What torch's own writer says when a write came back short, for whatever reason.
SHORT_WRITE = re.compile(r"unexpected pos|file write failed|failed writing file|iostream error")
REMEDY = "Make room there, or write elsewhere"


@contextmanager
def told(what: str, folder: Path, remedy: str = f"{REMEDY}.") -> Iterator[None]:
    """Raise a `DiskFullError` for failures inside that come from the full disk of `folder`."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        free = _free(folder)
        is_short = any(SHORT_WRITE.search(text_of(found)) for found in _chain(error))
        if not is_full(error) and not (is_short and free < 1 << 20):
            raise
        other = _file_elsewhere(error, folder)
        if other is not None:
            rule = f"the disk is full: {in_bytes(_free(other.parent))} are free in {other.parent}"
            raise DiskFullError(Problem(f"writing {other}", rule, f"{REMEDY}.")) from error
        rule = f"the disk is full: {in_bytes(free)} are free in {folder}"
        raise DiskFullError(Problem(f"writing {what}", rule, remedy)) from error


def is_full(error: BaseException) -> bool:
    """Return whether an error, or what it came from, says that a disk or a quota is full."""
    return any(
        (isinstance(found, OSError) and found.errno in CODES) or WORDS.search(text_of(found))
        for found in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _file_elsewhere(error: BaseException, folder: Path) -> Path | None:
    """Return the file that a full disk's error names, if it does not lie in `folder`."""
    for found in _chain(error):
        if isinstance(found, OSError) and found.errno in CODES and isinstance(found.filename, str):
            path = Path(found.filename).absolute()
            return None if path.is_relative_to(folder.absolute()) else path
    return None


def _free(folder: Path) -> int:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def in_bytes(count: float) -> str:
    """Return e.g. "512 B" or "2.6 MB" (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
