"""The end of another process is noticed, with and without a pidfd (R9)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from accel.machine import parent_watch
from tests.runner.launch.test_launcher import Parent, none_left


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_a_process_is_noticed(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def refused(process: int) -> int:
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
        monkeypatch.setattr(parent_watch, "POLL_SECONDS", 0.01)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        waiter = threading.Thread(
            target=parent_watch.wait_for_end,
            args=(process.pid, lambda: process.poll() is None),
            daemon=True,
        )
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        process.communicate(b"\n", timeout=60)
        waiter.join(60)
    assert not waiter.is_alive()


def test_nobody_survives_a_killed_parent(tmp_path: Path) -> None:
    code, _, _ = Parent(tmp_path, "stay_blocked").signal(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert none_left(tmp_path)
