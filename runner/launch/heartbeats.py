"""Heartbeats of watchdogs: files by which a parent sees that a worker's interpreter runs.

The watchdog of a worker is a thread of it. Where native code keeps the interpreter in every worker,
no watchdog notices it; their parent does, which sees that no file is touched. It makes the files,
in the machine's own folder for temporary ones, and removes them. Free of torch.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

NEVER = 0  # the time of a worker's file that is not watched yet, or not any more


class Heartbeat:
    """The heartbeat of one worker.

    Args:
        launch: id of the launch.
        rank: of the worker.
    """

    def __init__(self, launch: str, rank: int) -> None:
        self._path = Path(tempfile.gettempdir()) / f"runner-{launch}-{rank}"

    def make(self) -> None:
        """Make the file, as the parent; where that is impossible, nobody looks at it."""
        with contextlib.suppress(OSError):
            self._path.touch()
        self.rest()

    def beat(self) -> None:
        """Say that the worker's interpreter runs, if its parent has made the file."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def rest(self) -> None:
        """Say that the worker is not watched."""
        with contextlib.suppress(OSError):
            os.utime(self._path, ns=(NEVER, NEVER))

    def last(self) -> int | None:
        """Return when it was heard last, in ns; None: the worker is not watched."""
        try:
            return self._path.stat().st_mtime_ns or None
        except OSError:
            return None

    def remove(self) -> None:
        """Remove the file, as the parent."""
        with contextlib.suppress(OSError):
            self._path.unlink()
