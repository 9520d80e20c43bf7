"""A run is a list of sessions, each of whose files is written once. Free of torch.

``<run_dir>/sessions/0002/`` is made under its final name and is never moved. Its files are

- what was given: `config.yaml`, `environment.json`, `git.diff`, `threads.json` and, with the
  overrides, `job.json`: without it there is no session;
- `submitted.json`: the job of Slurm that it waits for;
- `begun.json`: the first optimizer step was made;
- `rank_<n>.json`: how a process failed or was stopped;
- `ended.json`: how the session ended.

The recipe and the history of a run are those of its newest session that has begun, else of its
first. A session that has not begun only records a try. A session that has begun and not ended is
being trained, if the run's lock is held; else it died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from itertools import count
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.recipe import paths
from runner.runs.json_files import Fields, read_json, write_json

logger = logging.getLogger(__name__)

FOLDER = "sessions"
CONFIG, JOB = "config.yaml", "job.json"
SUBMITTED, BEGUN, ENDED = "submitted.json", "begun.json", "ended.json"
_NUMBER = re.compile(r"\d{4,}")


def create(run_dir: Path) -> Path:
    """Create and return the folder of a new session."""
    parent = run_dir / FOLDER
    parent.mkdir(exist_ok=True)
    for number in count(len(_folders(run_dir)) + 1):
        folder = parent / f"{number:04}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def run_dir_of(folder: Path) -> Path:
    """Return the run directory of a session's folder; of another folder, itself."""
    return folder.parent.parent if folder.parent.name == FOLDER else folder


def of_run(run_dir: Path) -> list[Path]:
    """Return the sessions of a run, oldest first."""
    return [folder for folder in _folders(run_dir) if _has(folder, JOB)]


def begun(run_dir: Path) -> list[Path]:
    """Return the sessions of a run in which a step was made, oldest first."""
    return [folder for folder in _folders(run_dir) if _has(folder, BEGUN)]


def current(run_dir: Path) -> Path | None:
    """Return the session whose recipe is the run's; None: it is no run.

    The folder of a session is its own.
    """
    if _has(run_dir, JOB):
        return run_dir
    folders = _folders(run_dir)
    newest = (folder for folder in reversed(folders) if _has(folder, BEGUN))
    return next(newest, None) or next((folder for folder in folders if _has(folder, JOB)), None)


def read(run_dir: Path, name: str) -> bytes | None:
    """Return the content of a file of a run's current session; None without it."""
    folder = current(run_dir)
    with contextlib.suppress(FileNotFoundError):
        return None if folder is None else (folder / name).read_bytes()
    return None


def begin(folder: Path) -> None:
    """Record that the first step of a session is made: its recipe is the run's from now on."""
    for file in folder.iterdir():
        checkpoints.flush_file(file)
    checkpoints.flush_directory(folder.parent)
    write_json(folder / BEGUN, {"time": time.time()})
    # For people; nothing reads it.
    checkpoints.write_atomically(run_dir_of(folder) / CONFIG, (folder / CONFIG).read_bytes())


def end(folder: Path, code: int, **more: object) -> None:
    """Record how a session ended, unless that is recorded: by the process that has trained it.

    `code` is the exit code of the command. On a full disk, the session looks as if it had died.
    """
    if folder.is_dir() and not (folder / ENDED).exists():
        try:
            write_json(folder / ENDED, {"code": code, "time": time.time(), **more})
        except OSError as error:
            if error.errno not in paths.FULL:
                raise
            logger.warning("%s could not be written: %s", folder / ENDED, error)


def last(run_dir: Path) -> Path | None:
    """Return the session whose end is the run's: the newest that made a step, else the newest.

    None: there is none.
    """
    folders = begun(run_dir) or of_run(run_dir)
    return folders[-1] if folders else None


def summary(run_dir: Path) -> Fields:
    """Return what a run's current session says at its end; empty: it has come to no end."""
    folder = current(run_dir)
    return {} if folder is None else read_json(folder / ENDED).get("summary") or {}


def is_submitted(run_dir: Path) -> bool:
    """Return whether a run's newest session is one that waits for Slurm, or waited in vain."""
    return any(_has(one, SUBMITTED) for one in of_run(run_dir)[-1:])


def submitted_job(run_dir: Path) -> str | None:
    """Return the job of Slurm that a run was handed to last; None: to none."""
    for folder in reversed(of_run(run_dir)):
        if found := read_json(folder / SUBMITTED):
            return str(found["job"])
    return None


def _folders(run_dir: Path) -> list[Path]:
    parent = run_dir / FOLDER
    try:
        found = [name for name in os.listdir(parent) if _NUMBER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [parent / name for name in sorted(found, key=int)]


def _has(folder: Path, name: str) -> bool:
    return os.path.exists(f"{folder}/{name}")  # thousands of runs are listed
