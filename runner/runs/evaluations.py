"""`eval.json` of a run: what `runner eval` has measured. Free of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from runner.runs import json_files
from runner.runs.json_files import Fields, JsonObject

EVAL = "eval.json"
# What tells one evaluation from another: a later one of the same replaces the earlier.
IDENTITY = ("checkpoint", "step", "overrides", "notes")


def read(run_dir: Path) -> list[JsonObject]:
    """Return the evaluations of a run, oldest first; a damaged file holds none."""
    return list(json_files.read_json(run_dir / EVAL).get("evaluations") or ())


def add(run_dir: Path, evaluation: Fields) -> None:
    """Add an evaluation to a run's, in one piece.

    Splits that it has measured replace those of the same checkpoint under the same overrides, with
    the same notes.

    Raises:
        OSError: if the run directory cannot be written.
    """
    with _one_at_a_time(run_dir):
        others: list[JsonObject] = []
        same: JsonObject = {}
        for one in read(run_dir):
            if _identity(one) == _identity(evaluation):
                same |= one.get("metrics") or {}
            else:
                others.append(one)
        merged = {**evaluation, "metrics": {**same, **evaluation["metrics"]}}
        json_files.write_json(run_dir / EVAL, {"evaluations": [*others, merged]})


def _identity(evaluation: Fields) -> list[object]:
    return [evaluation.get(key) for key in IDENTITY]


@contextlib.contextmanager
def _one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Let no other process change the file in the context, where the file system has locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a network file system without locks of folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
