"""R6: one command at a time trains in a run directory, and its lock dies with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.runs import lock
from tests.helpers import python, ran, started

HOLD = "from runner.runs import lock; import sys, pathlib, time\n"
SLEEP = "print('ready', flush=True); time.sleep(300)\n"
HELD = f"{HOLD}with lock.held(pathlib.Path(sys.argv[1])): {SLEEP}"
SHARED = f"{HOLD}with lock.shared(pathlib.Path(sys.argv[1])): {SLEEP}"


@contextmanager
def process(code: str, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Run code that prints a line when it holds what it holds."""
    one = started(python("-c", code, str(run_dir)), run_dir)
    try:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        yield one
    finally:
        one.kill()
        one.communicate()


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    assert lock.holder(tmp_path) is None
    with process(HELD, tmp_path) as other:
        with pytest.raises(ConfigError) as caught, lock.held(tmp_path):
            pass
        for word in (f"process {other.pid} on ", os.uname().nodename, "lock.held", str(tmp_path)):
            assert word in str(caught.value)
        found = lock.holder(tmp_path)
        assert found is not None
        assert found.pid == other.pid
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert lock.holder(tmp_path) is None
        with lock.held(tmp_path):
            assert lock.holder(tmp_path) is not None
            with pytest.raises(ConfigError), lock.held(tmp_path):
                pass  # a thread of the same process
    assert lock.holder(tmp_path) is None


def test_who_reads_the_files_of_a_run_drops_no_lock(tmp_path: Path) -> None:
    """A callback that copies the run directory opens and closes the lock's file (R6)."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with lock.held(run_dir):
        shutil.copytree(run_dir, tmp_path / "copy")
        probe = python("-c", f"{HOLD}print(lock.holder(pathlib.Path(sys.argv[1])))", str(run_dir))
        seen = ran(probe, tmp_path)
        assert f"process {os.getpid()} on" in seen.stdout, seen.stderr


def test_workers_that_outlive_their_parent_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WORKER_SECONDS", 0.1)
    with process(SHARED, tmp_path) as worker:
        assert lock.holder(tmp_path) is None
        with pytest.raises(ConfigError, match="workers of an earlier command"):
            with lock.held(tmp_path):
                pass
        worker.kill()
        worker.wait()
        with lock.held(tmp_path):
            pass


def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    with lock.held(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with lock.held(tmp_path):  # the loader's children of a run that was killed do not keep it
            assert "process" in str(lock.holder(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("fcntl.fcntl", refuse)
    with lock.held(tmp_path):
        assert "offers no locks" in caplog.text


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writ"), lock.held(tmp_path / "nothing"):
        pass
