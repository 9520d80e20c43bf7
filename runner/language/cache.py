"""A cache of tokenized text: folders named by their content, written once, read by many processes.

An entry is written under another name beside its own while a lock is held, flushed and renamed, so
that an entry that exists is whole. What a killed writer has left is removed by the next one. Its
arrays are memory-mapped: ranks, loader workers and jobs on one machine share the same pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.checkpoint import directory
from accel.machine.errors import ConfigError

VERSION = 1  # of what entries hold: a change makes others


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            directory.tidy(folder)
            staged = directory.stage(folder)
            try:
                write(staged)
                for file in filter(Path.is_file, staged.rglob("*")):
                    directory.flush_file(file)
                directory.publish(staged, folder)
            except BaseException:
                directory.discard(staged)
                raise
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


class Arrays:
    """Flat ``.npy`` files of a folder that are written piece by piece, in constant memory.

    Args:
        folder: where they are written.
        dtypes: type of each file's elements by its name.
    """

    def __init__(self, folder: Path, **dtypes: str) -> None:
        self._files = {name: (folder / f"{name}.npy").open("wb") for name in dtypes}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.lengths = dict.fromkeys(dtypes, 0)

    def __enter__(self) -> Self:
        self._write_headers()
        return self

    def extend(self, name: str, values: ArrayLike) -> None:
        """Append values to the array `name`."""
        array = np.asarray(values, self._dtypes[name])
        self._files[name].write(array.tobytes())
        self.lengths[name] += len(array)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.seek(0)
        self._write_headers()
        for file in self._files.values():
            file.close()

    def _write_headers(self) -> None:
        # NumPy leaves room for a first axis that grows: the header's length stays the same.
        for name, file in self._files.items():
            shape = (self.lengths[name],)
            header = {"descr": self._dtypes[name].str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)


@cache
def load(folder: Path, name: str) -> NDArray[Any]:
    """Return an array of an entry, mapped into memory."""
    found: NDArray[Any] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return found
