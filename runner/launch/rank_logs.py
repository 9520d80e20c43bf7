"""Output of ranks: rank 0 writes to the terminal, the others to log files. Free of torch."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from runner.recipe import user_frames
from runner.runs.outcomes import log_folder

TAIL_BYTES = 64 * 1024
TAIL_LINES = 20
# Where the report of `faulthandler` begins.
CRASH = "Fatal Python error"
# How its report begins where native code has kept the interpreter for the time limit.
TIMED_OUT = "Timeout ("
CURRENT_THREAD = "Current thread "
# Begins the first line of each process in a log: a resumed run adds to it.
BEGIN = "--- rank"
# Standard error as the launcher has given it, on ranks whose own goes to their log.
_TERMINAL: list[TextIO] = []


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the file that receives the output of `rank`; rank 0 writes to the terminal."""
    return log_folder(run_dir) / f"rank_{rank}.log"


def leave_terminal_to_rank_zero(run_dir: Path, rank: int) -> None:
    """Redirect the output of this process and its children to its log, unless it is rank 0.

    The file descriptors themselves are moved, so that output of C++ libraries goes along. Text is
    appended: a resumed run adds to the log.
    """
    if rank == 0:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    _TERMINAL.append(os.fdopen(os.dup(sys.stderr.fileno()), "w"))
    redirect(log_file(run_dir, rank))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    print(f"{BEGIN} {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}")


def terminal() -> TextIO:
    """Return the terminal, for urgent messages of any rank."""
    return _TERMINAL[-1] if _TERMINAL else sys.stderr


def redirect(log: Path) -> None:
    """Append the output of this process to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def close_input() -> None:
    """Redirect standard input from /dev/null: several processes cannot share the terminal's."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def tail(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a process in its log; of a crash in native code, its report."""
    return crash(path, num_lines) or hang(path, num_lines) or _text(path).splitlines()[-num_lines:]


def hang(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """Return the user's frames where the interpreter hung; without such a report, no lines."""
    _, found, report = f"\n{_text(path)}".rpartition(f"\n{TIMED_OUT}")
    lines = f"{TIMED_OUT}{report}".splitlines()
    return [lines[0], *(_own(lines) or lines[1:])][:num_lines] if found else []


def crash(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """Return the fatal error and the stack of the thread that crashed; without a crash, no lines.

    The stack is reduced to the user's code, where it has any. A report without the stack of the
    thread has at most `num_lines`.
    """
    _, found, report = _text(path).rpartition(CRASH)
    if not found:
        return []
    lines = (found + report).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(CURRENT_THREAD)), None)
    if first is None:
        return lines[:num_lines]
    stack = list(itertools.takewhile(str.strip, lines[first + 1 :]))
    return [lines[0], lines[first], *(_own(stack) or stack)[:num_lines]]


def _own(lines: Sequence[str]) -> list[str]:
    """Return the lines of a stack that are in the user's code."""
    places = ((line, user_frames.FRAME.match(line)) for line in lines)
    return [line for line, place in places if place and user_frames.is_own(place[1])]


def _text(path: Path) -> str:
    """Return the last part of the output of the last process in a log."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return text.rpartition(f"\n{BEGIN}")[2]
