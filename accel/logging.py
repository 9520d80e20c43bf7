"""Logging that knows which process it is in."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from accel.machine import env
from accel.machine.errors import ConfigError, unknown_choice
from accel.state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that by default logs only on the main process.

    Each logging method takes two more arguments: `main_process_only` (default True), and `in_order`
    (default False), with which the processes log one after the other, by rank, and which every rank
    therefore has to call.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._seen: set[Hashable] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log `msg` where this process is meant to.

        Args:
            level: level of the message.
            msg: the message, with the placeholders of `logging`.
            args: what they stand for.
            kwargs: `main_process_only`, `in_order`, and those of `logging.Logger.log`.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        if in_order and not main_process_only:
            self._log_in_order(level, msg, *args, **kwargs)
        elif not main_process_only or _is_main_process():
            self._log_here(level, msg, *args, **kwargs)

    def _log_here(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] += 1
        processed, options = self.process(msg, kwargs)
        self.logger.log(level, processed, *args, **options)

    def _log_in_order(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        state = PartialState()
        kwargs["stacklevel"] += 1
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self._log_here(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    def warning_once(self, *args: object, **kwargs: Any) -> None:
        """Log a warning the first time it is called with these arguments; then do nothing."""
        key = (str(args), str(sorted(kwargs.items())))
        if key not in self._seen:
            self._seen.add(key)
            kwargs.setdefault("stacklevel", 3)
            self.warning(*args, **kwargs)


def _is_main_process() -> bool:
    """Return whether this is process 0; before the state is built the launcher's word counts."""
    if PartialState._shared_state:
        return PartialState().is_main_process
    return env.integer("RANK", 0) == 0


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger `name`, which by default logs only on the main process.

    Args:
        name: usually ``__name__``.
        log_level: level of this logger and of the root; None: ACCELERATE_LOG_LEVEL, else they stay.

    Raises:
        ConfigError: for a level that does not exist.

    Example:
        >>> logger = get_logger(__name__)
        >>> logger.info("once")
        >>> logger.info("by each process", main_process_only=False, in_order=True)
    """
    logger = logging.getLogger(name)
    level = log_level or env.read("ACCELERATE_LOG_LEVEL")
    if level:
        source = "log_level" if log_level else "ACCELERATE_LOG_LEVEL"
        known = logging.getLevelNamesMapping()  # programs may add names
        if level.upper() not in known:
            raise ConfigError(unknown_choice(source, level, known))
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger)


@contextmanager
def silenced(names: Collection[str], level: int) -> Iterator[None]:
    """Within the context, have some loggers of libraries log nothing below a level.

    Args:
        names: of the loggers.
        level: the least level that they log.
    """
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for found in loggers:
        found.setLevel(level)
    try:
        yield
    finally:
        for found, own in zip(loggers, before, strict=True):
            found.setLevel(own)
