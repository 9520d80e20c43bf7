"""Stand-ins for training in the workers of `test_launcher.py`. No torch: a fresh start is fast."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem
from runner.training.stopping import StopFlag

LONG = 300.0


def rank() -> int:
    value = Environment.read().rank
    assert value is not None
    return value


def note_processes(run_dir: Path) -> None:
    """Start a child, as a data loader would, and write down both process ids."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"])
    partial = run_dir / f"pids_{rank()}.partial"
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(run_dir / f"pids_{rank()}")


def report(run_dir: Path, stop: StopFlag) -> int:
    here = Environment.read()
    print(f"hello from rank {here.rank} of {here.world_size}")
    print("accel is", sys.modules["accel"].__file__)
    print("path", *sys.path)
    (run_dir / f"seen_{here.rank}").write_text(f"{here.local_rank} {here.world_size}")
    return 0


def wait_for_signal(run_dir: Path, stop: StopFlag) -> int:
    note_processes(run_dir)
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if stop._requested:
            (run_dir / f"saved_{rank()}").touch()
            return 75
        time.sleep(0.01)
    return 1


def stay_blocked(run_dir: Path, stop: StopFlag) -> int:
    """Hang where no signal handler of Python's runs, as in a collective whose peer is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return wait_for_signal(run_dir, StopFlag())


def second_fails(run_dir: Path, stop: StopFlag) -> int:
    note_processes(run_dir)
    if rank() == 1:
        wait_for_file(run_dir / "pids_0")
        raise ValueError("the second one broke\nwith two lines")
    return wait_for_signal(run_dir, stop)


def cascade(run_dir: Path, stop: StopFlag) -> int:
    """Rank 1 fails; rank 0 fails because of it, and is gone first."""
    if rank() == 1:
        try:
            raise ValueError("the cause")
        finally:
            # Not earlier: the order is what is tested.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    wait_for_file(run_dir, "rank_1.json")
    raise RuntimeError("connection closed by peer")


def refuse(run_dir: Path, stop: StopFlag) -> int:
    raise ConfigError(Problem("model.width=0", "it is at least 1", "Set model.width=1."))


def crash(run_dir: Path, stop: StopFlag) -> int:
    """Rank 1 is killed without a word; rank 0 notices and complains."""
    note_processes(run_dir)
    if rank() == 1:
        wait_for_file(run_dir / "pids_0")
        print("the last words of rank 1", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_file(run_dir / "pids_1")
    pid = int((run_dir / "pids_1").read_text().split()[0])
    with contextlib.suppress(ProcessLookupError):  # already collected
        select.select([os.pidfd_open(pid)], [], [])  # until its last thread has ended
    raise RuntimeError("connection closed by peer")


def wait_for_file(path: Path, pattern: str = "") -> None:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if any(path.glob(pattern)) if pattern else path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(str(path))
