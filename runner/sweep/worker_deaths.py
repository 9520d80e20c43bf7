"""Which job's process died first, under a launcher that then ends all the others with it.

joblib's executor is broken by the death of one worker: it kills the rest, and its error names none.
The processes note their ids in the command's folder, and the kernel tells which ended first.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import threading
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 0.1
# How long the other processes may take to end after the first.
END_SECONDS = 10.0


class Deaths:
    """Watches the processes whose notes lie in a folder, in a thread, while the context lasts.

    Nothing is known where the system has no pidfds.

    Args:
        control: the folder of a sweep's command.
        is_watched: whether to watch at all.

    Attributes:
        first: the job whose process died first, in its midst; None: none has, or it is not known.
        others: the jobs that ran then, whose processes the launcher ends.
    """

    def __init__(self, control: Path, *, is_watched: bool = True) -> None:
        self._control = control
        self._is_watched = is_watched and hasattr(os, "pidfd_open")
        self._watched: dict[int, int] = {}  # pidfd by job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="worker-deaths", daemon=True)
        self.first: int | None = None
        self.others: list[int] = []

    def __enter__(self) -> Deaths:
        """Begin to watch."""
        if self._is_watched:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._end()
        for one in self._watched.values():
            os.close(one)
        self._watched.clear()

    def settle(self) -> None:
        """Let the other processes end too; remove the notes of all that have died."""
        self._end()
        if self.first is None:
            return
        for number in self.others:
            _ended([self._watched[number]], END_SECONDS)
        for number in (self.first, *self.others):
            (self._control / f"{number}.pid").unlink(missing_ok=True)

    def _end(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._look()
            # A stop may come with the death itself: it is looked at once more.
            ended = _ended(list(self._watched.values()), POLL_SECONDS)
            if ended and self._has_died(ended):
                return

    def _look(self) -> None:
        """Watch the processes that have noted themselves, and no longer those that have ended."""
        noted = {int(note.stem): note for note in self._control.glob("*.pid")}
        for number in [one for one in self._watched if one not in noted]:
            os.close(self._watched.pop(number))
        for number in noted.keys() - self._watched.keys():
            with contextlib.suppress(OSError, ValueError):  # it has just ended, or is being written
                pid, host = noted[number].read_text(encoding="utf-8").split()
                if host == platform.node():
                    self._watched[number] = os.pidfd_open(int(pid))

    def _has_died(self, ended: set[int]) -> bool:
        """Return whether a process has died that ran a job; of several, the first is not known."""
        gone = [number for number, one in self._watched.items() if one in ended]
        self._look()  # a job that has ended has removed its note
        dead = [number for number in gone if number in self._watched]
        if len(dead) == 1:
            (self.first,) = dead
            self.others = sorted(self._watched.keys() - dead)
        return bool(dead)


def _ended(watched: Sequence[int], seconds: float) -> set[int]:
    """Return the processes of pidfds that have ended, as soon as one has."""
    poll = select.poll()
    for one in watched:
        poll.register(one, select.POLLIN)
    return {one for one, _ in poll.poll(seconds * 1000)}
