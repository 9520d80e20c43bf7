"""Finished jobs of a sweep whose run directories are gone: they are trained again.

Removing the directory of a job, or all that is in it, is how a person asks for that. One listing of
the sweep's directory tells, and one look at each job's recipe. A trial of a study keeps its value
there: it is not doubled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from runner.run_dir import lock
from runner.run_dir.atomic_update import CONFIG
from runner.sweep import directory
from runner.sweep.changes import named
from runner.sweep.directory import Sweep
from runner.sweep.journal import JobState


def of_finished(sweep: Sweep, states: Mapping[int, JobState]) -> list[int]:
    """Return the numbers of complete jobs without a run directory, or with nothing in it."""
    with os.scandir(sweep.path) as entries:
        there = {entry.name for entry in entries}
    names = {
        number: directory.run_name(number) for number, one in states.items() if one.is_complete
    }
    return [
        number
        for number, name in sorted(names.items())
        if name not in there or _is_empty(f"{sweep.path}/{name}")
    ]


def _is_empty(place: str | Path) -> bool:
    """Return whether a directory has nothing in it but a lock."""
    if os.path.exists(f"{place}/{CONFIG}"):
        return False
    with contextlib.suppress(OSError):  # not to be read: somebody's
        return set(os.listdir(place)) <= {lock.FILE}
    return False


def forget(sweep: Sweep, numbers: Collection[int], states: Mapping[int, JobState]) -> list[int]:
    """Record in the journal that jobs are to be trained again; return their numbers.

    `states` are those in which the jobs are complete. Where another command has done so, too, the
    records of both count once.
    """
    gone = [number for number in numbers if _is_gone(sweep, number)]
    sweep.journal.removed({number: states[number] for number in gone})
    return gone


def _is_gone(sweep: Sweep, number: int) -> bool:
    """Return whether a directory can be made, which a server asks its disk, or is empty."""
    place = sweep.run_dir(number)
    try:
        place.mkdir()
    except FileExistsError:
        return _is_empty(place)
    except OSError:  # nothing can be written there, which the journal tells
        return True
    with contextlib.suppress(OSError):  # another command has just put its lock there
        place.rmdir()
    return True


def line(numbers: Collection[int], *, again: bool) -> str:
    """Return what becomes of finished jobs whose directories are gone, in words."""
    found = sorted(numbers)
    if len(found) == 1:
        ends = "it is trained again" if again else "its result stays, it is not trained again"
        return f"The directory of finished {named(found)} is missing: {ends}."
    ends = "they are trained again" if again else "their results stay, none is trained again"
    return f"The directories of finished {named(found)} are missing: {ends}."
