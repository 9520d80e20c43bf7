"""The untracked Python files of a work tree, as a patch and in words. Free of torch.

`git diff HEAD` leaves them out, and a new module is one of them until `git add`. The patch is
written here and not by git, which would need an index of its own, or a process for each file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from runner.run_dir.json_files import Fields

MOST_FILES, MOST_BYTES = 2_000, 2_000_000
MOST_NAMES = 3
_PLAIN = re.compile(rb"[\w./+-]+")


def is_python(name: str) -> bool:
    """Return whether a file is a Python module by its name."""
    return name.endswith(".py")


def python_files(names: Iterable[str]) -> list[str]:
    """Return the Python files among the names."""
    return [name for name in names if is_python(name)]


def creation_patch(root: Path, names: Iterable[str]) -> tuple[bytes, int]:
    """Return a patch for `git apply` that creates text files, and how many it creates.

    Files near the root come first. Those that `MOST_BYTES` in total, or `MOST_FILES`, have no room
    for are skipped, and so are those that cannot be read or are not text. Of a symbolic link the
    file that it leads to is kept.

    Args:
        root: the top folder of the work tree.
        names: the files, relative to it.
    """
    patches, left = [], MOST_BYTES
    nearest = sorted(names, key=lambda name: (name.count("/"), name))
    for name in nearest[:MOST_FILES]:
        with contextlib.suppress(OSError):  # removed meanwhile
            path = root / name
            found = path.stat()
            if found.st_size > left:
                continue
            content = path.read_bytes()
            if b"\0" not in content:
                left -= len(content)
                patches.append(_creation(name, content, bool(found.st_mode & 0o100)))
    return b"".join(patches), len(patches)


def _creation(name: str, content: bytes, executable: bool) -> bytes:
    """Return a patch that creates one file.

    Source: https://git-scm.com/docs/diff-format#generate_patch_text_with_p
    """
    old, new = _quoted(f"a/{name}"), _quoted(f"b/{name}")
    mode = b"100755" if executable else b"100644"
    head = b"diff --git %s %s\nnew file mode %s\n" % (old, new, mode)
    if not content:
        return head
    ended = content.endswith(b"\n")
    number = content.count(b"\n") + (not ended)
    lines = b"+" + content.removesuffix(b"\n").replace(b"\n", b"\n+") + b"\n"
    end = b"" if ended else b"\\ No newline at end of file\n"
    return head + b"--- /dev/null\n+++ %s\n@@ -0,0 +1,%d @@\n" % (new, number) + lines + end


def _quoted(name: str) -> bytes:
    """Return a name as patches have it: in quotes, with octal bytes, if it is not plain."""
    raw = name.encode(errors="surrogateescape")
    if _PLAIN.fullmatch(raw):
        return raw
    characters = (bytes([byte]) for byte in raw)
    return b'"%s"' % b"".join(c if _PLAIN.fullmatch(c) else b"\\%03o" % ord(c) for c in characters)


def number_of(git: Fields) -> int:
    """Return how many untracked Python files a recorded git state has.

    Earlier versions have recorded names alone, at most 200 of all untracked files.
    """
    number: int | None = git.get("num_untracked_python")
    return len(python_files(git.get("untracked") or ())) if number is None else number


def described(git: Fields) -> str:
    """Return e.g. "2 untracked Python files: model.py, data/new.py"; empty: there are none."""
    number, names = number_of(git), python_files(git.get("untracked") or ())
    if not number:  # an earlier version may have cut the list before them
        return "untracked Python files" if git.get("untracked_sha256") else ""
    listed = ", ".join(names[:MOST_NAMES]) + (", …" if number > MOST_NAMES else "")
    return f"{number} untracked Python file{'' if number == 1 else 's'}: {listed}"
