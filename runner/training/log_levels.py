"""Log levels of a run (`hydra.verbose`), in each of its processes.

Source: https://hydra.cc/docs/tutorials/basic/running_your_app/logging/
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

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
def applied(levels: Mapping[str, str]) -> Iterator[None]:
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
