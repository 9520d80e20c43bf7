"""Jobs at once: started as they fit, waited for, stopped together (S2)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep.pool import record_death
from tests.runner.sweep.stand_ins import StandIn, begin_job, end_job, run_pool


def test_a_failed_job_stops_no_other(tmp_path: Path) -> None:
    server = StandIn({1: 1, 2: 2})
    assert run_pool(server, tmp_path, range(4)) == {0: 0, 1: 1, 2: 2, 3: 0}
    assert [order.number for order in server.orders] == [0, 1, 2, 3]


def test_the_output_of_jobs_at_once_goes_to_their_logs(tmp_path: Path) -> None:
    from runner.sweep.devices import Machine

    server = StandIn()
    run_pool(server, tmp_path, [7])
    assert server.orders[0].log == str(tmp_path / "0007" / "logs" / "console.log")
    run_pool(server, tmp_path, [8], Machine(1))
    assert server.orders[1].log is None


def test_a_process_that_is_killed_is_recorded_as_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_pool(StandIn({1: -9}), tmp_path, [0, 1]) == {0: 0, 1: 1}
    run = RunRecord(tmp_path / "0001")
    assert run.status == "failed"
    assert run.reason == "its process was ended by SIGKILL (out of memory?)"
    assert "was ended by SIGKILL" in capsys.readouterr().out


def test_a_job_of_another_command_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = iter([lock.Holder(command="other")] * 2)
    monkeypatch.setattr(lock, "holder", lambda run_dir: next(held, None))
    assert run_pool(StandIn(), tmp_path, [0]) == {0: 0}
    assert capsys.readouterr().out.count("another command trains it") == 1


def test_a_stop_signal_lets_no_further_job_begin(tmp_path: Path) -> None:
    server = StandIn({0: 75})
    server.on_start = lambda order: os.kill(os.getpid(), signal.SIGTERM)
    assert run_pool(server, tmp_path, range(3)) == {0: 75}
    assert set(server.sent) == {(0, signal.SIGTERM)}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_ends_the_jobs_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StandIn({0: 130})

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pool(server, tmp_path, range(3))
    assert set(server.sent) == {(0, signal.SIGINT), (1, signal.SIGINT)}
    assert len(server.orders) == 2


def test_the_death_of_a_process_is_recorded_by_its_parent(tmp_path: Path) -> None:
    record_death(tmp_path / "0000", 1, "it was killed")  # before there was anything
    session = begin_job(tmp_path, 0)
    record_death(tmp_path / "0000", 1, "it was killed")
    record_death(tmp_path / "0000", 1, "it exited with 3")  # once is enough
    assert RunRecord(tmp_path / "0000").reason == "it was killed"
    session = begin_job(tmp_path, 0)
    end_job(session, 0.5)
    assert record_death(tmp_path / "0000", 1, "its process was killed behind it") == 0
    assert json.loads((session / "ended.json").read_text())["code"] == 0
