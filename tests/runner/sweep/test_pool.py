"""Jobs at once: started as they fit, waited for, stopped together (S2)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep import attempt, pool
from tests.runner.sweep.stand_ins import StandIn, run_pool


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
    monkeypatch.setattr(pool, "BUSY_SECONDS", 0.01)
    held = iter([lock.Holder(command="other"), None])
    monkeypatch.setattr(lock, "holder", lambda run_dir: next(held, None))
    server = StandIn()
    assert run_pool(server, tmp_path, [0]) == {0: 0}
    assert "another command trains it" in capsys.readouterr().out


def test_a_job_that_another_command_takes_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "BUSY_SECONDS", 0.01)
    server = StandIn({0: attempt.BUSY})
    server.on_start = lambda order: server.codes.update({0: 0})
    assert run_pool(server, tmp_path, [0]) == {0: 0}
    assert [order.number for order in server.orders] == [0, 0]


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
