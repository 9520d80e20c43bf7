"""Files that may be read as others are: safetensors writes its own for their owner alone."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give the file that is put at `path` in the context the mode of a newly made one (umask)."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)
