"""`run.log` of a run: everything that its main process prints, as plain text.

Standard output and standard error of the process are copied line by line as they are written: the
run's own lines, the user's prints and warnings. Of a line that is redrawn on a terminal, such as a
progress bar, the last drawing is kept; control codes are left out. A resumed run adds to the file.
The launcher of several processes writes into the same file (how they ended), complete lines at a
time. Output that native code writes past Python (a crash in C++) is on the terminal only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from runner.runs.directory import RUN_LOG

BEGIN = "--- process"
# Sequences of ANSI X3.64: colours and the like, titles of windows, single escapes.
_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
MOST_WAITING = 1 << 16  # characters of a line without an end


class RunLog:
    """An open `run.log`; each line is one write, so that several processes may write at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        # Begun lines by process, thread and stream: neither a forked child nor another thread goes
        # on with them.
        self._waiting: dict[tuple[int, int, int], str] = {}

    def feed(self, source: int, text: str) -> str:
        """Take text of a stream, told apart by the number `source`, and write complete lines.

        Returns:
            Why it could not be written, the first time; else nothing.
        """
        place = os.getpid(), threading.get_ident(), source
        *lines, rest = (self._waiting.pop(place, "") + text).split("\n")
        if rest:
            self._waiting[place] = rest[-MOST_WAITING:]
        # A redrawn line that was erased at last leaves none.
        kept = [_plain(line) for line in lines if _plain(line) or "\r" not in line.rstrip("\r")]
        return self._write("".join(f"{line}\n" for line in kept))

    def line(self, text: str) -> str:
        """Write a line that is on no stream; return as `feed`."""
        return self._write(f"{_plain(text)}\n")

    def _write(self, text: str) -> str:
        if self._file is None or not text:
            return ""
        try:
            os.write(self._file, text.encode("utf-8", errors="replace"))
        except OSError as error:  # a full disk does not end a run for its log
            self.close()
            return f"{self._path} could not be written ({error.strerror}): it ends here."
        return ""

    def close(self) -> None:
        """Write what is left of a line, and close the file."""
        left, self._waiting = self._waiting, {}
        for (pid, _, _), rest in left.items():
            if pid == os.getpid() and _plain(rest).strip():
                self._write(f"{_plain(rest)}\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _plain(line: str) -> str:
    """Return a line as it is last seen: without what was drawn over, and without codes."""
    last = next((part for part in reversed(line.split("\r")) if _CODES.sub("", part)), "")
    return _CONTROLS.sub("", _CODES.sub("", last)).rstrip()


class Tee:
    """A text stream that copies what is written to it into a log; all else is the stream's own."""

    def __init__(self, stream: TextIO, log: RunLog, number: int) -> None:
        self._stream, self._log, self._number = stream, log, number

    def write(self, text: str) -> int:
        """Write to the log and to the stream."""
        wrong = self._log.feed(self._number, str(text))
        if wrong:
            self._stream.write(f"{wrong}\n")
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write each of some texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)


_ACTIVE: list[RunLog] = []


@contextlib.contextmanager
def captured(run_dir: Path, what: str = "") -> Iterator[None]:
    """Copy standard output and standard error of this process into a run's log, in the context.

    Where the file cannot be opened, a warning says so, and the run goes on.

    Args:
        run_dir: the run directory.
        what: written in the first line, e.g. the command.
    """
    try:
        log = RunLog(run_dir / RUN_LOG)
    except OSError as error:
        print(f"{run_dir / RUN_LOG} cannot be written ({error.strerror}).", file=sys.stderr)
        yield
        return
    log.line(f"{BEGIN} {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} {what}".rstrip())
    streams = sys.stdout, sys.stderr
    tees = Tee(sys.stdout, log, 1), Tee(sys.stderr, log, 2)
    sys.stdout, sys.stderr = tees
    _ACTIVE.append(log)
    try:
        yield
    finally:
        _ACTIVE.remove(log)
        # Whoever has replaced them meanwhile keeps what they have set.
        sys.stdout = streams[0] if sys.stdout is tees[0] else sys.stdout
        sys.stderr = streams[1] if sys.stderr is tees[1] else sys.stderr
        log.close()


def note(line: str) -> None:
    """Write a line to the log alone: of progress that a terminal shows as a bar."""
    for log in _ACTIVE:
        log.line(line)


FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # as Hydra's


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment, which a progress bar or a log may replace."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.stream = sys.stderr
        super().emit(record)


@contextlib.contextmanager
def log_levels_applied(levels: Mapping[str, str]) -> Iterator[None]:
    """Log at other levels in the context; afterwards they are as before.

    Args:
        levels: by name of a logger, "" for the root, the name of its level. Empty: nothing changes.
    """
    if not levels:
        yield
        return
    root, handler = logging.getLogger(), _ToStandardError()
    loggers = {name: logging.getLogger(name) for name in levels}
    before = {name: logger.level for name, logger in loggers.items()}
    root.addHandler(handler)
    for name, level in levels.items():
        loggers[name].setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, level_before in before.items():
            loggers[name].setLevel(level_before)


def announce(name: str) -> None:
    """Print the name of a run on standard error, if torch is still to be loaded."""
    if "torch" not in sys.modules:
        print(f"{name}: loading PyTorch …", file=sys.stderr, flush=True)
