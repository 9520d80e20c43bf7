"""A cache of tokenized text: folders named by their content, written once, read by many processes.

An entry is written under another name beside its own while a lock is held, flushed and renamed, so
that an entry that exists is whole. What a killed writer has left is removed by the next one. Its
arrays are memory-mapped: ranks, loader workers and jobs on one machine share the same pages.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.checkpoint import directory
from accel.machine.errors import ConfigError

VERSION = 2  # of what entries hold: a change makes others


def cached(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return an entry of the cache; the first process that asks for it writes it, others wait.

    Args:
        folder: where the entry lies; its name tells its content.
        write: writes the entry's files into the folder that it is given.

    Raises:
        ConfigError: if the folder of the cache cannot be written or locked.
    """
    if folder.is_dir():
        return folder
    with _locked(folder):
        if not folder.is_dir():
            with directory.new_folder(folder) as staged:
                write(staged)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f".{folder.name}.lock").open("w")
        # A record lock: no child that is forked meanwhile keeps it after this process.
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
        rule = f"tokenized text is written there under a lock, and that failed ({error})"
        remedy = "Set data.cache_dir to a folder of a local disk."
        raise ConfigError.of(f"data.cache_dir={folder.parent}", rule, remedy) from error
    with file:
        yield


def append(file: BinaryIO, values: ArrayLike) -> int:
    """Write values behind a flat array, in the type that its file's name ends with."""
    return file.write(np.asarray(values, dtype_of(file.name)).tobytes())


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the type of a flat array by its file's name, such as tokens.int32."""
    return np.dtype(name.rpartition(".")[2])


@cache
def load(folder: Path, name: str) -> NDArray[Any]:
    """Return a flat array of an entry, mapped into memory."""
    return np.asarray(np.memmap(folder / name, dtype_of(name), mode="r"))
