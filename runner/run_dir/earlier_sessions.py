"""Code, versions and data of a run's earlier sessions, kept where a resume has others.

A resume replaces `environment.json` and `git.diff`. Where git state, packages, versions or data of
the session before differ, its files stay as ``environment.<n>.json`` and ``git.<n>.diff``: steps of
the run were made by that code, as ``config.<n>.yaml`` is a recipe that steps were made with. Free
of torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.run_dir import data_files, field_types, provenance
from runner.run_dir.json_files import METRICS, SUMMARY, Fields
from runner.run_dir.provenance import DIFF, ENVIRONMENT

UNRECORDED = b"{}\n"  # kept of a session whose environment.json was missing
_KEPT = re.compile(r"environment\.(\d+)\.json")


def keep(run_dir: Path, folder: Path) -> None:
    """Give the run's environment a second name, unless the staged one in `folder` equals it.

    A run that has never been trained has no session to keep. Where the record is damaged, its code
    is not known: what is left of it is kept, and of a missing one that there was a session.
    """
    current = run_dir / ENVIRONMENT
    then, now = _read(current), _read(folder / ENVIRONMENT)
    if not now or not _is_trained(run_dir) or (then and not differences(then, now)):
        return
    content = current.read_bytes() if current.exists() else UNRECORDED
    number, last = max(_kept(run_dir), default=(0, None))
    if last is not None and last.read_bytes() == content and (then or _is_patch(run_dir, number)):
        return  # an earlier commit was killed after this function
    number += 1
    # The patch first: with the environment's second name, the session is kept.
    (run_dir / diff_of(number)).unlink(missing_ok=True)  # of a commit that was killed
    if (run_dir / DIFF).exists():
        _second_name(run_dir / DIFF, run_dir / diff_of(number))
    name = run_dir / f"environment.{number:04}.json"
    if current.exists():
        _second_name(current, name)
    else:
        checkpoints.write_atomically(name, content)


def _is_trained(run_dir: Path) -> bool:
    return any((run_dir / name).exists() for name in (METRICS, SUMMARY))


def _is_patch(run_dir: Path, number: int) -> bool:
    """Return whether the patch that is kept of a session is the run's present one."""
    found = [
        path.read_bytes() if path.exists() else None
        for path in (run_dir / DIFF, run_dir / diff_of(number))
    ]
    return found[0] == found[1]


def diff_of(number: int) -> str:
    """Return the name of the patch that is kept of a session."""
    return f"git.{number:04}.diff"


def differences(then: Fields, now: Fields) -> list[str]:
    """Return how code, versions and data of two recorded environments differ, in sentences."""
    return [line for lines in by_subject(then, now).values() for line in lines]


def by_subject(then: Fields, now: Fields) -> dict[str, list[str]]:
    """Return `differences` under "code", "versions" and "data"."""
    return {
        "code": provenance.code_differences(then, now),
        "versions": provenance.version_differences(then, now),
        "data": data_files.differences(then, now),
    }


def kept(run_dir: Path) -> list[tuple[str, Fields]]:
    """Return names and contents of the kept environments of a run, oldest first.

    One that is damaged has no content.
    """
    return [(name, found) for name, _, found in kept_with_patches(run_dir)]


def kept_with_patches(run_dir: Path) -> list[tuple[str, str, Fields]]:
    """Return `kept` with the name of the patch of each, which a clean work tree has none of."""
    try:
        return [(path.name, diff_of(number), _read(path)) for number, path in _kept(run_dir)]
    except OSError:
        return []


def notes(run_dir: Path, newest: Fields) -> dict[str, list[str]]:
    """Return in sentences that steps of a run were made by other code, versions or data.

    Args:
        run_dir: the run.
        newest: content of its environment.json; empty where it is missing or damaged.

    Returns:
        Sentences by subject, as in `by_subject`; no subject without any.
    """
    found: dict[str, list[str]] = {}
    for name, then in kept(run_dir):
        if not then:
            line = (
                f"code and versions of an earlier session are not known: {name} is damaged or empty"
            )
            found.setdefault("code", []).append(line)
        elif not newest:
            line = f"an earlier session of the run is recorded in {name}, its last one is not"
            found.setdefault("code", []).append(line)
        else:
            for subject, differ in by_subject(then, newest).items():
                if differ:
                    line = f"an earlier session of the run had other {subject} ({name})"
                    found.setdefault(subject, []).append(line)
    return found


def _kept(run_dir: Path) -> list[tuple[int, Path]]:
    found = ((_KEPT.fullmatch(path.name), path) for path in run_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _read(path: Path) -> Fields:
    """Return the content of an environment; empty where there is none, or it is damaged."""
    try:
        return field_types.fitted(field_types.loads(path.read_bytes()), field_types.ENVIRONMENT)[0]
    except (OSError, ValueError):
        return {}


def _second_name(path: Path, name: Path) -> None:
    name.unlink(missing_ok=True)  # of a commit that was killed
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        checkpoints.write_atomically(name, path.read_bytes())
