"""Runs and sweeps below folders. Free of torch; nothing is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel.machine.errors import ConfigError, Problem
from runner.runs import sessions
from runner.runs.directory import SWEEP
from runner.runs.record import RunRecord

DEFAULT_FOLDER = "runs"
DEPTH = 6
NO_RUNS = ("tensorboard", "logs")  # folders of a sweep, of a folder for each job
_STAMPED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_NUMBERED = re.compile(r"\d{4,}")


def find_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Return the runs that lie in folders or below, jobs of sweeps among them, each once.

    A directory that is named as those of runs and has no recipe is one of them, too: it is broken.

    Raises:
        ConfigError: naming each folder that is not there.
    """
    problems: list[Problem] = []
    found: dict[str, RunRecord] = {}
    for folder in folders:
        path = Path(os.path.abspath(os.path.expanduser(folder)))
        if not path.is_dir():
            rule = "it is a file" if path.exists() else "there is no such folder"
            remedy = "Name a run, a sweep, or a folder of runs such as runs/digits."
            problems += ConfigError.of(os.fspath(folder), rule, remedy).problems
            continue
        for run in _walk(path, DEPTH):
            found.setdefault(os.path.realpath(run.path), run)
    ConfigError.raise_if(problems)
    return list(found.values())


def require_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Return the runs of folders as `find_runs`, each folder having at least one.

    Raises:
        ConfigError: naming each folder that is not there, or has no run.
    """
    found: dict[str, RunRecord] = {}
    problems: list[Problem] = []
    for folder in folders:
        runs = find_runs([folder])
        if not runs:
            rule = f"no run lies there: a run directory holds {sessions.FOLDER}"
            remedy = "Name a run, a sweep, or a folder of runs; runner list shows those in runs."
            problems += ConfigError.of(os.fspath(folder), rule, remedy).problems
        found |= {str(run.path): run for run in runs if str(run.path) not in found}
    ConfigError.raise_if(problems)
    return list(found.values())


def _walk(path: Path, depth: int) -> Iterator[RunRecord]:
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:  # not ours to read
        return
    names = {entry.name for entry in entries}
    if sessions.FOLDER in names or _STAMPED.fullmatch(path.name):
        of_sweep = _NUMBERED.fullmatch(path.name) and (path.parent / SWEEP).is_file()
        yield RunRecord(path, path.parent.name if of_sweep else None)
        return
    folders = [entry for entry in entries if entry.name[0] != "." and entry.is_dir()]
    if SWEEP in names:
        for entry in folders:
            if _NUMBERED.fullmatch(entry.name):
                yield RunRecord(Path(entry.path), path.name)
            elif depth > 0 and entry.name not in NO_RUNS:  # another sweep may lie there
                yield from _walk(Path(entry.path), depth - 1)
        return
    if depth > 0:
        for entry in folders:
            yield from _walk(Path(entry.path), depth - 1)
