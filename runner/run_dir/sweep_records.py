"""Which records of a sweep's journal count, for those that write it and those that look at it.

A record is an attempt that has started, one that has ended, or the removal of the directory of a
complete job. Free of torch.
"""

from __future__ import annotations

from pathlib import Path

from runner.run_dir import field_types
from runner.run_dir.json_files import JsonObject

FILE = "journal.jsonl"
EVENTS = STARTED, ENDED, REMOVED = "started", "ended", "removed"
FINISHED, PRUNED = "finished", "pruned"
# No job of these is started again.
COMPLETE = (FINISHED, PRUNED)


def counts(
    event: object, attempt: object, status: object, *, newest: str, is_complete: bool
) -> bool:
    """Return whether a record changes where its job stands.

    The end of an attempt counts only until the next one is started, unless it completes the job: it
    may be recorded late, by another process than the job's. A complete job is not begun again,
    whoever starts it. A removal counts if it is still that attempt that the job stands by.

    Args:
        event: of the record.
        attempt: the attempt that it is of.
        status: how that ended.
        newest: the attempt that was started last.
        is_complete: whether nothing is left to do in the job.
    """
    if event == STARTED:
        return not is_complete
    if event == REMOVED:
        return is_complete and attempt == newest
    return attempt == newest or status in COMPLETE


def last_of_each_job(sweep_dir: Path) -> dict[int, JsonObject]:
    """Return the last record that counts of each job in a sweep's journal; torn lines do not."""
    found: dict[int, JsonObject] = {}
    newest: dict[int, str] = {}
    try:
        lines = (sweep_dir / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            record, _ = field_types.fitted(field_types.loads(line), field_types.JOURNAL)
        except ValueError:  # cut off by a kill
            continue
        job, event, attempt = record.get("job"), record.get("event"), record.get("attempt", "")
        if job is None or event not in EVENTS:
            continue
        before, status = newest.get(job, ""), record.get("status")
        is_complete = found.get(job, {}).get("status") in COMPLETE
        if counts(event, attempt, status, newest=before, is_complete=is_complete):
            found[job] = record
            newest[job] = {STARTED: attempt, REMOVED: ""}.get(event, before)
    return found
