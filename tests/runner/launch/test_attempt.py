"""The cause of the end of an attempt, from what its processes and nodes have left (R9)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runner.launch import attempt, rank_logs
from runner.launch.attempt import Ended
from runner.launch.worker_group import Failure
from runner.runs import outcomes
from runner.runs.outcomes import Outcome


def test_ends_without_a_failure(tmp_path: Path) -> None:
    done, stopped = Outcome(0, 1.0, 0, ""), Outcome(1, 1.0, 75, "SIGTERM")
    assert attempt.conclude(tmp_path, {}, [done]) == Ended(0)
    assert attempt.conclude(tmp_path, {}, [done, stopped]) == Ended(75)


def test_a_lost_node_is_the_cause_of_errors_of_communication(tmp_path: Path) -> None:
    broken = Outcome(0, 1.0, 1, "Connection reset by peer", is_consequence=True)
    lost = Outcome(1, 2.0, 1, "node b (rank 1) is lost: its connection was closed")
    failed = {0: Failure(1, 1.0)}
    assert attempt.conclude(tmp_path, failed, [broken, lost]) == Ended(1, lost)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (-signal.SIGKILL, 1, "its process was ended by SIGKILL (out of memory?)"),
        (0, 1, "its process exited with 0 before the run was complete"),
        (130, 130, "it was interrupted"),
    ],
)
def test_a_silent_process_is_described_by_its_status(
    tmp_path: Path, status: int, code: int, message: str
) -> None:
    ended = attempt.conclude(tmp_path, {3: Failure(status, 5.0)}, [])
    assert ended.cause is not None
    assert (ended.code, ended.cause.rank, ended.cause.message) == (code, 3, message)


def test_a_process_whose_interpreter_hung_is_described_so(tmp_path: Path) -> None:
    log = rank_logs.log_file(tmp_path, 3)
    log.write_text("--- rank 3\nTimeout (0:20:00)!\nThread 0x1 (most recent call first):\n")
    ended = attempt.conclude(tmp_path, {3: Failure(1, 5.0)}, [])
    assert ended.cause is not None
    assert ended.cause.message == "it hangs: native code keeps the interpreter"
    assert "Timeout (0:20:00)!" in ended.cause.traceback


def test_a_hang_is_the_cause_of_what_the_watchdog_ended(tmp_path: Path) -> None:
    hang = Outcome(1, 1.0, 1, "it hangs: no progress for 8 s")
    outcomes.note_hang(tmp_path, hang)
    failed = {rank: Failure(1, 2.0) for rank in (0, 1)}
    assert attempt.conclude(tmp_path, failed, []) == Ended(1, hang)


def test_each_attempt_has_a_store_of_its_own() -> None:
    with attempt.hosted_store() as first:
        first.set("key", "of the first attempt")
    with attempt.hosted_store() as second:
        assert second.port > 0
        assert not second.check(["key"])
