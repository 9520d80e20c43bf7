"""Which files and folders the arguments of a data factory name, and how they stand. Free of torch.

Sizes and times of change are recorded, no content is read. What a factory reads without being given
its path is not known here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.recipe import paths
from runner.run_dir import json_files
from runner.run_dir.json_files import Fields, JsonObject

MOST_FILES = 2_000  # of a folder, behind which its record says that it is not complete
AMOUNT = ("files", "bytes")
SIZES = (*AMOUNT, "newest")


def find(node: object, key: str = "data", cwd: str = ".") -> dict[str, JsonObject]:
    """Return the state of each file and folder that a factory's node names, by dotted key."""
    return {name: state(path) for name, path in _paths(node, key, cwd)}


def _paths(node: object, key: str, cwd: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _paths(value, f"{key}.{name}", cwd)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _paths(value, f"{key}.{number}", cwd)
    elif isinstance(node, str) and node and key.rpartition(".")[2] not in ("name", "_target_"):
        path = os.path.join(cwd, os.path.expanduser(node))
        with contextlib.suppress(OSError, ValueError):  # a text that is no name of a file
            if os.path.exists(path):
                yield key, os.path.abspath(path)


def state(path: str) -> JsonObject:
    """Return path, number of files, bytes, newest change (seconds since the epoch), and a digest.

    The digest is of the name, size and time of each file.
    """
    number = total = 0
    newest, complete, digest = 0.0, True, hashlib.sha256()
    is_file = os.path.isfile(path)
    for file in [Path(path)] if is_file else paths.files_below(path):
        if number == MOST_FILES:
            complete = False
            break
        with contextlib.suppress(OSError):
            found, name = file.stat(), "" if is_file else os.path.relpath(file, path)
            described = f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"
            digest.update(described.encode(errors="surrogateescape"))
            number, total = number + 1, total + found.st_size
            newest = max(newest, found.st_mtime)
    counted = {"files": number, "bytes": total, "newest": newest, "complete": complete}
    return {"path": path, **counted, "digest": digest.hexdigest()[:16]}


def differences(then: Fields, now: Fields) -> list[str]:
    """Return how the data of two recorded environments differs, a sentence each.

    What was not there then is no difference: a factory may write its cache.
    """
    before, after = then.get("data") or {}, now.get("data") or {}
    lines = []
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            lines.append(f"{key}: {old.get('path')} is not there")
        elif not is_changed(old, new):
            continue  # perhaps elsewhere
        elif old.get("path") != new.get("path"):
            lines.append(f"{key}: {_named(old)} then, {_named(new)} now")
        elif any(old.get(name) != new.get(name) for name in AMOUNT):
            lines.append(f"{key}: {size(old)} then, {size(new)} now")
        elif old.get("newest") != new.get("newest"):
            changed = written(new)
            lines.append(f"{key}: files were written since ({changed}), of the same sizes")
        else:
            lines.append(f"{key}: files have other names, sizes or times, of the same sum")
    return lines


def is_changed(then: Fields, now: Fields) -> bool:
    """Return whether two recorded states differ, wherever they lie."""
    have_digests = "digest" in then and "digest" in now  # those of earlier versions have none
    names = ("digest",) if have_digests else SIZES
    return any(then.get(name) != now.get(name) for name in names)


def _named(found: Fields) -> str:
    return f"{found.get('path')} ({size(found)})"


def size(found: Fields) -> str:
    """Return how much there is, e.g. "2 files of 400 bytes"."""
    files = "1 file" if found.get("files") == 1 else f"{found.get('files')} files"
    more = "" if found.get("complete", True) else " or more"
    return f"{files} of {found.get('bytes')} bytes{more}"


def written(found: Fields) -> str:
    """Return when the newest file was written, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.get("newest") or 0))


def identity(recorded: Fields) -> str:
    """Return a short name of recorded data, equal where each has as many files and bytes.

    Empty: none is recorded. Times do not count, nor does where it lies: data may be copied anew for
    each job, and each run may write its cache. Records of earlier versions have no digest.
    """
    found = recorded.get("data") or {}
    if not found:
        return ""
    parts = {key: [one.get(name) for name in AMOUNT] for key, one in found.items()}
    return json_files.digest(parts)[:8]
