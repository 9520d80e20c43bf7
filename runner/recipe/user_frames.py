"""Tracebacks reduced to frames of the user's code. Free of torch.

Where an error passes through the user's code, frames of the runner, torch and the standard library
are dropped; where it does not, the last frame is named. RUNNER_FULL_TRACEBACK=1 shows all frames,
and the logs of a run keep them.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from accel.machine import env
from accel.machine.errors import AccelError, ConfigError, text_of
from runner.recipe import trust

VARIABLE = "RUNNER_FULL_TRACEBACK"
# How torch begins an error that it brings from a loader worker.
IN_LOADER_WORKER = re.compile(r"Caught \w+ in DataLoader (worker process \d+)\.")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
FRAME = re.compile(r'^ *File "([^"]+)", line \d+')


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    text = text_of(error)
    name = type(error).__name__
    worker = IN_LOADER_WORKER.match(text)
    if worker is not None:  # the error is the last line of the traceback that follows
        return f"{text.splitlines()[-1]} ({worker[1]})"
    if isinstance(error, AccelError):
        return text
    return f"{name}: {text.splitlines()[0]}" if text else name


def is_own(path: str) -> bool:
    """Return whether a source file is the user's: neither ours, installed nor Python's.

    Packages that the user trusts by name are the user's wherever they are installed.
    """
    if path.startswith("<"):
        return False
    real = os.path.realpath(path)
    if any(_within(real, folder) for folder in _trusted()):
        return True
    root = Path(__file__).resolve().parents[2]
    inner = [str(root / "runner"), str(root / "accel"), sysconfig.get_path("stdlib")]
    return not _INSTALLED.search(real) and not any(_within(real, folder) for folder in inner)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _trusted() -> list[str]:
    """Return the folders, or the files, of the imported packages that the user trusts."""
    try:
        names = trust.trusted()
    except ConfigError:  # the table is invalid, which is reported elsewhere
        return []
    files = [getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) for name in names]
    return [
        os.path.realpath(os.path.dirname(file) if file.endswith("__init__.py") else file)
        for file in files
        if file
    ]


def has_own(error: BaseException) -> bool:
    """Return whether an error, apart from its causes, passed through the user's code."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        return True
    return any(
        is_own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def formatted(error: BaseException) -> list[str]:
    """Return the lines of a traceback, reduced to the user's frames where it has any.

    Without such frames an `AccelError` gets no traceback, since its message has the remedy; any
    other error gets the file and line that raised it.
    """
    found = traceback.TracebackException.from_exception(error)
    if env.read(VARIABLE) not in (None, "", "0"):
        return list(found.format())
    parts = [without_inner("".join(one.format(chain=False)).splitlines()) for one in chain(found)]
    own = [lines for lines in parts if any(map(FRAME.match, lines))]
    if own:
        shown = own if parts[-1] in own else [*own, parts[-1]]
        return ["\n\n".join("\n".join(lines) for lines in shown) + "\n"]
    if isinstance(error, AccelError):
        return []
    if not found.stack:
        return list(found.format())
    last = found.stack[-1]
    where = f"raised in {last.name}, {last.filename}:{last.lineno}"
    return [*found.format_exception_only(), f"({where}; {VARIABLE}=1 shows the traceback)\n"]


def chain(found: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the causes of an error, the first one first, and then the error."""
    inner = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    if inner is not None:
        yield from chain(inner)
    yield found


def without_inner(lines: list[str]) -> list[str]:
    """Return the lines of a quoted traceback without frames that are not the user's."""
    kept: list[str] = []
    inner, indent = False, 0
    for line in lines:
        found = FRAME.match(line)
        if found:
            inner, indent = not is_own(found.group(1)), len(line) - len(line.lstrip())
        elif len(line) - len(line.lstrip()) <= indent:
            inner = False
        carets = bool(line.strip()) and not line.strip(" ^~")
        if not inner and not carets:
            kept.append(line)
    return kept
