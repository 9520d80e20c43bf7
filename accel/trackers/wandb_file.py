"""Rows of a W&B run: when wandb-core closes them, and whether they are in the run's file.

wandb keeps the row of the newest step open until a later step, ``commit=True`` or the end of the
run; it takes no value for a step whose row is closed. Closed rows wait in a buffer of wandb-core,
which ends with its parent, also by a kill.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.logging import get_logger
from accel.machine import env

logger = get_logger(__name__)
INTERVAL = "x_transaction_log_flush_interval"
INTERVAL_VARIABLE = "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"
SECONDS_BETWEEN_WRITES = 0.1
LONGEST_INTERVAL = 1.0  # seconds that a checkpoint waits for
SECONDS_TO_FLUSH = 10.0
BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def frequent_writes(given: Any) -> Any:
    """Return the settings of `wandb.init` with which wandb-core writes its buffer often.

    Args:
        given: those of the user: `wandb.Settings`, a mapping or None. Their interval stays.
    """
    import wandb

    fields = getattr(wandb.Settings, "model_fields", {})
    if INTERVAL not in fields or env.read(INTERVAL_VARIABLE):
        return given
    if not isinstance(given, wandb.Settings):
        return {INTERVAL: SECONDS_BETWEEN_WRITES, **(given or {})}
    if INTERVAL in given.model_fields_set:
        return given
    settings = given.model_copy()
    setattr(settings, INTERVAL, SECONDS_BETWEEN_WRITES)
    return settings


class Rows:
    """The history rows of an open run.

    Args:
        run: of `wandb.init`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._first = run.step  # greater than 0 where W&B continues a run
        self._file: TransactionLog | None = None
        self._open: float | None = None  # step of the newest row, as logged, if it may be open
        self._newest = -1  # the newest step that the caller gave
        self._closed = -1  # the newest step that the caller had given when `flush` closed a row
        self._late: dict[str, int] = {}  # in the newest row: names from earlier steps, and these
        self._is_told = False

    def log(self, values: Mapping[str, object], step: int | None, **kwargs: Any) -> None:
        """Record values; those of a step that `flush` closed are in the next row."""
        row = step if step is None else self._row_of(values, step)
        self._run.log(values, step=row, **kwargs)
        commit = kwargs.get("commit")
        if row is None if commit is None else commit:
            self._open = None
        else:
            self._open = max(self._open or 0, math.inf if row is None else row)
        if step is not None:
            self._newest = max(self._newest, step)

    def _row_of(self, values: Mapping[str, object], step: int) -> int:
        if self._closed < 0 or step < self._newest:  # an older one than the newest is refused
            return step
        current = self._run.step
        row = max(step, current)
        if row == current and any(self._late.get(name, step) != step for name in values):
            row += 1  # or the value of another step would be replaced
        if row > current:
            self._late = {}
        if row > step:
            self._late |= dict.fromkeys(values, step)
            self._tell_of_late(values, step)
        return row

    def _tell_of_late(self, values: Mapping[str, object], step: int) -> None:
        if not self._is_told:
            logger.warning(
                "wandb: %s of step %s is logged after save_state has written the row of that step, "
                "and W&B takes no more values for it: such values are recorded at the next step. "
                "Log a step's values before save_state.",
                ", ".join(values),
                step,
            )
        self._is_told = True

    def flush(self) -> None:
        """Close the newest row, and wait until all rows are in the run's file."""
        settings, newest = self._run.settings, self._run.step
        if settings.mode == "shared":  # the server gives the steps
            return
        if self._open is not None and self._open >= newest:
            self._run.log({}, step=newest, commit=True)
            self._closed, self._late = self._newest, {}
        self._open, last = None, self._run.step - 1
        self._file = self._file or TransactionLog(Path(settings.sync_file))
        if last < self._first or not self._file.path.is_file():
            return  # no rows, or mode="disabled"
        interval = getattr(settings, INTERVAL, 0.0)
        if 0 < interval <= LONGEST_INTERVAL:
            self._wait(self._file, last)
        else:
            logger.warning_once(
                "wandb: %s=%s seconds%s: a killed run loses values from before its last "
                "checkpoint. Set at most %s by wandb.init(settings=…), of wandb 0.31 or later.",
                INTERVAL,
                interval,
                "" if interval else " (the file is written in blocks of 32 KiB)",
                LONGEST_INTERVAL,
            )

    def _wait(self, file: TransactionLog, step: int) -> None:
        end = time.monotonic() + SECONDS_TO_FLUSH
        while not file.has(step):
            if time.monotonic() > end:
                logger.warning_once(
                    "wandb: the row of step %s is not in %s after %s s: a kill may lose it.",
                    step,
                    file.path,
                    SECONDS_TO_FLUSH,
                )
                return
            time.sleep(0.02)


class TransactionLog:
    """The file of a run: records of wandb's in LevelDB's log format.

    Args:
        path: ``run-<id>.wandb``.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0  # byte of a block: what is before it is known
        self._newest = -1

    def has(self, step: int) -> bool:
        """Return whether the row of a step, or of a later one, is in the file."""
        from wandb.proto.wandb_internal_pb2 import Record

        with self.path.open("rb") as file:
            file.seek(self._start)
            data = file.read()
        start = self._start
        for at, content in _records(data, HEADER if start == 0 else 0):
            self._start = start + at // BLOCK * BLOCK
            if b"_step" in content:
                record = Record.FromString(content)
                if record.WhichOneof("record_type") == "history":
                    self._newest = max(self._newest, record.history.step.num)
        return self._newest >= step


def _records(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the content of each whole record from the start of a block."""
    begin, parts = at, None
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        content = data[at + HEADER : at + HEADER + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(content) < length:
            return
        if kind in (FULL, FIRST):
            begin, parts = at, b""
        at += HEADER + length
        if parts is not None:  # else a record that began in an earlier block
            parts += content
            if kind in (FULL, LAST):
                yield begin, parts
                parts = None
