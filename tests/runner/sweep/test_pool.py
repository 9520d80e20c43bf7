"""Jobs at once: started as they fit, waited for, stopped together (S2)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep import attempt, pool
from runner.sweep.fork_server import Event, ServerDied
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
    server = StandIn()
    real, calls = server.start, []

    def start(order: Any) -> None:
        calls.append(order.number)
        if len(calls) == 1:
            server.waiting.append(Event(0, 0, attempt.BUSY))
        else:
            real(order)

    server.start = start  # type: ignore[method-assign]
    assert run_pool(server, tmp_path, [0]) == {0: 0}
    assert calls == [0, 0]


def test_a_stop_signal_lets_no_further_job_begin(tmp_path: Path) -> None:
    server = StandIn({0: 75})
    server.on_start = lambda order: os.kill(os.getpid(), signal.SIGTERM)
    assert run_pool(server, tmp_path, range(3)) == {0: 75}
    assert set(server.sent) == {(0, signal.SIGTERM)}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_ends_the_jobs_and_is_raised(tmp_path: Path) -> None:
    server = StandIn({0: 130})

    def interrupt(seconds: float) -> list[Event]:
        server.events = StandIn.events.__get__(server)  # type: ignore[method-assign]
        raise KeyboardInterrupt

    server.events = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_pool(server, tmp_path, range(3))


def test_the_death_of_the_server_fails_its_jobs_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = StandIn({0: -9, 1: -9})
    real = server.events

    def die(seconds: float) -> list[Event]:
        server.events = real  # type: ignore[method-assign]
        server.waiting.clear()
        raise ServerDied("it was killed")

    server.events = die  # type: ignore[method-assign]
    codes = run_pool(server, tmp_path, range(4))
    assert codes == {0: 1, 1: 1, 2: 0, 3: 0}
    assert "the jobs that ran have failed" in capsys.readouterr().out
