"""Which records of a sweep's journal count (S1)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runner.runs import sweep_records
from runner.runs.sweep_records import COMPLETE, EVENTS, FILE
from runner.sweep import journal
from tests.runner.written_runs import write_sweep


def write(folder: Path, lines: list[dict[str, object]]) -> dict[int, dict[str, object]]:
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sweep_records.last_of_each_job(folder)


def test_a_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    assert len(sweep_records.last_of_each_job(sweep)) == 12
    assert sweep_records.last_of_each_job(tmp_path) == {}


def test_an_end_that_is_recorded_late_is_not_that_of_a_newer_attempt(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"event": "started", "job": 0, "attempt": "a"},
        {"event": "started", "job": 0, "attempt": "b"},
        {"event": "ended", "job": 0, "attempt": "a", "status": "failed"},
        {"event": "started", "job": 1, "attempt": "a"},
        {"event": "started", "job": 1, "attempt": "b"},
        {"event": "ended", "job": 1, "attempt": "a", "status": "pruned"},
    ]
    found = write(tmp_path, lines)
    assert found[0] == lines[1]
    assert found[1] == lines[5]  # complete, whichever attempt has come to the end


RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(EVENTS),
            "job": st.integers(0, 1),
            "attempt": st.sampled_from(["a", "b", "c"]),
            "status": st.sampled_from(["finished", "pruned", "failed", "stopped"]),
        }
    )
)


@given(RECORDS)
def test_who_looks_at_a_sweep_sees_what_its_command_sees(lines: list[dict[str, object]]) -> None:
    for line in lines:
        if line["event"] != "ended":
            del line["status"]
    with tempfile.TemporaryDirectory() as folder:
        last = write(Path(folder), lines)
        states = journal.Journal(Path(folder)).states()
    complete = {job for job, record in last.items() if record.get("status") in COMPLETE}
    assert complete == {job for job, state in states.items() if state.is_complete}
    for job, record in last.items():
        if record["event"] == "started":
            assert (states[job].status, states[job].attempt) == ("running", record["attempt"])
        elif record["event"] == "ended":
            assert states[job].status == record["status"]
