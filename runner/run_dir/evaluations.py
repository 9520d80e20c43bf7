"""`eval.json` of a run: what `runner eval` has measured. Free of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from runner.run_dir import data_files, field_types
from runner.run_dir.json_files import Fields, JsonObject, write_json

EVAL = "eval.json"
# What tells one evaluation from another, with the amount of its data: a later one of the same
# replaces the earlier.
IDENTITY = ("checkpoint", "step", "overrides", "code", "notes")


def read(run_dir: Path) -> list[JsonObject]:
    """Return the evaluations of a run, oldest first; a damaged file holds none."""
    try:
        content = field_types.loads((run_dir / EVAL).read_bytes())
    except (OSError, ValueError):
        return []
    found, _ = field_types.fitted(content, field_types.EVALUATIONS)
    return list(found.get("evaluations") or ())


def add(run_dir: Path, evaluation: Fields) -> None:
    """Add an evaluation to a run's, in one piece.

    Splits that it has measured replace those of the same checkpoint under the same overrides,
    by the same code on as much data (`data_files.identity`), with the same notes.

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
        write_json(run_dir / EVAL, {"evaluations": [*others, merged]})


def _identity(evaluation: Fields) -> list[object]:
    return [*(evaluation.get(key) for key in IDENTITY), data_files.identity(evaluation)]


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
