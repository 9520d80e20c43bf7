"""Which records of a sweep's journal count, for those that write it and those that look at it.

A record is an attempt that has started, or one that has ended. Free of torch.
"""

from __future__ import annotations

from pathlib import Path

from runner.runs import json_files
from runner.runs.json_files import JsonObject

FILE = "journal.jsonl"
EVENTS = STARTED, ENDED = "started", "ended"
FINISHED, PRUNED = "finished", "pruned"
# No job of these is started again.
COMPLETE = (FINISHED, PRUNED)


def counts(
    event: object, attempt: object, status: object, *, newest: str, is_complete: bool
) -> bool:
    """Return whether a record changes where its job stands.

    The end of an attempt counts only until the next one is started, unless it completes the job: it
    may be recorded late, by another process than the job's. A complete job is not begun again,
    whoever starts it.

    Args:
        event: of the record.
        attempt: the attempt that it is of.
        status: how that ended.
        newest: the attempt that was started last.
        is_complete: whether nothing is left to do in the job.
    """
    if event == STARTED:
        return not is_complete
    return attempt == newest or status in COMPLETE


def last_of_each_job(sweep_dir: Path) -> dict[int, JsonObject]:
    """Return the last record that counts of each job in a sweep's journal; torn lines do not."""
    found: dict[int, JsonObject] = {}
    newest: dict[int, str] = {}
    for record in json_files.read_lines(sweep_dir / FILE):
        job, event, attempt = record.get("job"), record.get("event"), record.get("attempt", "")
        if job is None or event not in EVENTS:
            continue
        before, status = newest.get(job, ""), record.get("status")
        is_complete = found.get(job, {}).get("status") in COMPLETE
        if counts(event, attempt, status, newest=before, is_complete=is_complete):
            found[job] = record
            newest[job] = attempt if event == STARTED else before
    return found
