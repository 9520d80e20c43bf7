"""The journal of a sweep: one JSON object a line, appended by every process that runs a job.

A record is one write to a file opened with O_APPEND, flushed to the disk, so that jobs on several
machines share it. A last line that was cut off is passed over. Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError
from runner.exit_codes import DONE, INTERRUPTED, STOPPED
from runner.recipe import paths
from runner.runs import slurm_job
from runner.runs.json_files import finite
from runner.runs.sweep_records import (
    COMPLETE,
    ENDED,
    EVENTS,
    FILE,
    FINISHED,
    STARTED,
    counts,
)

logger = logging.getLogger(__name__)

FAILED, RUNNING, PENDING = "failed", "running", "pending"
STOP, INTERRUPT = "stopped", "interrupted"
_STATUS = {DONE: FINISHED, STOPPED: STOP, INTERRUPTED: INTERRUPT}
Objective = float | list[float] | None


def status_of(code: int) -> str:
    """Return the status of a job that ended with an exit code."""
    return _STATUS.get(code, FAILED)


@dataclass
class JobState:
    """Where a job stands, by its newest attempt.

    Attributes:
        status: pending, running, or how the attempt ended.
        overrides: of the job.
        attempts: how many have been started.
        attempt: id of the newest one.
        pid: its process.
        host: the machine of that.
        slurm: id of the Slurm job that it runs in; empty: in none.
        ended: the record of its end; empty: there is none.
    """

    status: str = PENDING
    overrides: Sequence[str] = ()
    attempts: int = 0
    attempt: str = ""
    pid: int = 0
    host: str = ""
    slurm: str = ""
    ended: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.status in COMPLETE

    @property
    def objective(self) -> Objective:
        """The job's objective; None: it has none."""
        value = self.ended.get("objective")
        if isinstance(value, float):
            return value
        if isinstance(value, list):
            return [float(one) for one in value]
        return None if value is None else float(str(value))


class Journal:
    """Appends to and reads the journal in the folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def started(self, job: int, overrides: Sequence[str]) -> str:
        """Record that this process starts a job; return the id of the attempt.

        Raises:
            ConfigError: if it cannot be written, as on a full disk.
        """
        attempt = secrets.token_hex(6)
        where = _where()
        if (slurm := slurm_job.own_id()) is not None:
            where["slurm"] = slurm
        record = {"event": STARTED, "job": job, "overrides": list(overrides), **where}
        self.append({**record, "attempt": attempt})
        return attempt

    def ended(
        self,
        job: int,
        attempt: str,
        overrides: Sequence[str],
        code: int,
        *,
        status: str | None = None,
        objective: Objective = None,
        **more: object,
    ) -> None:
        """Record how an attempt ended; `more` are values for the table.

        Raises:
            ConfigError: if it cannot be written, as on a full disk.
        """
        where = _where()
        record = {"event": ENDED, "job": job, "overrides": list(overrides), **where}
        end = {"code": code, "status": status or status_of(code), "objective": objective}
        self.append({**record, **end, "attempt": attempt, **more})

    def append(self, record: Mapping[str, object]) -> None:
        """Append a record and flush it to the disk.

        Raises:
            ConfigError: if it cannot be written, as on a full disk.
        """
        text = json.dumps(finite(record), allow_nan=False, ensure_ascii=False)
        line = f"{text}\n".encode(errors="replace")
        try:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if self._is_torn(file):  # by a writer that was killed, or met a full disk
                    line = b"\n" + line
                if os.write(file, line) != len(line):
                    raise OSError(paths.FULL[0], os.strerror(paths.FULL[0]))
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            rule = f"the journal of the sweep could not be written ({paths.failure(error)})"
            remedy = "Make room and give the command again: finished jobs are not trained again."
            raise ConfigError.of(str(self.path), rule, remedy) from error

    @staticmethod
    def _is_torn(file: int) -> bool:
        size = os.fstat(file).st_size
        return size > 0 and os.pread(file, 1, size - 1) != b"\n"

    def records(self, job: int | None = None) -> list[dict[str, object]]:
        """Return all records, or those of one job; lines that were cut off are passed over."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        if job is not None:
            mark = f'"job": {job},'.encode()
            lines = [line for line in lines if mark in line]
        return [record for record in _parsed(list(filter(None, lines))) if _is_record(record)]

    def states(self) -> dict[int, JobState]:
        """Return the state of each job that was ever started, by number."""
        return states(self.records())

    def state(self, job: int) -> JobState:
        """Return the state of one job; its lines alone are parsed."""
        return states(self.records(job)).get(job, JobState())


def _where() -> dict[str, object]:
    """Return when, and by which process, a record is written."""
    return {"time": time.time(), "host": platform.node(), "pid": os.getpid()}


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Return the values of lines of JSON: of all at once, which is faster, if none is torn."""
    with contextlib.suppress(ValueError):
        found: list[Any] = json.loads(b"[%s]" % b",".join(lines))
        if len(found) == len(lines):
            return found
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except ValueError:
            logger.debug("A torn line of the journal is passed over: %r", line[:80])
    return whole


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("event") not in EVENTS:
        return False
    return isinstance(value.get("job"), int)


def states(records: Iterable[Mapping[str, object]]) -> dict[int, JobState]:
    """Return the state of each job from the records of a journal that count."""
    found: dict[int, JobState] = {}
    for record in records:
        number = int(str(record["job"]))
        state = found.get(number) or found.setdefault(number, JobState())
        attempt, overrides = str(record.get("attempt", "")), record.get("overrides")
        if isinstance(overrides, list):
            state.overrides = overrides
        event, status, done = record["event"], record.get("status"), state.is_complete
        if not counts(event, attempt, status, newest=state.attempt, is_complete=done):
            continue
        if event == STARTED:
            state.status, state.ended = RUNNING, {}
            state.attempts, state.attempt = state.attempts + 1, attempt
            state.pid, state.host = int(str(record.get("pid", 0))), str(record.get("host", ""))
            state.slurm = str(record.get("slurm", ""))
        else:
            state.status, state.ended = str(record.get("status", FAILED)), record
    return found
