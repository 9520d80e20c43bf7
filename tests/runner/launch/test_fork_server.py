"""The server that forks warm processes: separate, told apart, never orphaned (R9, S2)."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.launch import fork_server
from runner.launch.fork_server import Fork, ForkServer, Order
from runner.training.stopping import HEARD_SIGNALS
from tests.helpers import SECONDS, alive, wait_until

HERE = "tests.runner.launch.test_fork_server"


def report(path: str, text: str, code: int = 0) -> int:
    """Run in a fork: say what is seen there."""
    assert fork_server.NVML_CHECK not in os.environ
    seen = [os.getcwd(), os.environ.get("OF_THE_JOB"), text]
    print("output of the job", flush=True)
    Path(path).write_text("\n".join(map(str, seen)))
    return code


def wait(path: str) -> int:
    """Run in a fork: wait to be stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_SIGNALS)
    Path(path).write_text(str(os.getpid()))
    time.sleep(SECONDS)
    return 0


@pytest.fixture(autouse=True)
def without_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the import of DeepSpeed by another test has set in this process."""
    monkeypatch.delenv(fork_server.NVML_CHECK, raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("RUNNER_IMPORTS", "")
    found = ForkServer(modules=("json", "not_installed_anywhere"))
    yield found
    found.close()
    assert not alive(found.pid)


def on_gpu(path: str) -> int:
    """Run in a fork: compute on the first GPU that it sees."""

    Path(path).write_text(str(int(torch.ones(3, device="cuda").sum())))
    return 0


@pytest.mark.gpu
def test_a_fork_of_the_warm_server_uses_a_gpu(tmp_path: Path) -> None:
    warm = ForkServer()
    try:
        for number in (1, 2):
            assert ended(warm.start(order(number, "on_gpu", tmp_path))) == 0
            assert (tmp_path / str(number)).read_text() == "3"
    finally:
        warm.close()


def ended(fork: Fork) -> int:
    """Return the exit status of a job."""
    assert wait_until(lambda: fork.poll() is not None)
    assert fork.status is not None
    return fork.status


def order(number: int, function: str, folder: Path, **arguments: object) -> Order:
    return Order(
        number,
        f"{HERE}:{function}",
        {"path": str(folder / str(number)), **arguments},
        log=str(folder / f"{number}.log"),
        environment={"OF_THE_JOB": str(number)},
        cwd=str(folder),
        command=("runner", "-m"),
    )


def appeared(path: Path) -> int:
    assert wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_each_job_is_a_process_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    for number, code in ((1, 0), (2, 3)):
        assert (
            ended(server.start(order(number, "report", tmp_path, text="hello", code=code))) == code
        )
    seen = [(tmp_path / str(number)).read_text().splitlines() for number in (1, 2)]
    assert seen == [[str(tmp_path), str(n), "hello"] for n in (1, 2)]
    assert (tmp_path / "1.log").read_text() == "output of the job\n"
    assert "OF_THE_JOB" not in os.environ


def test_a_signal_from_before_the_fork_reaches_it(server: ForkServer, tmp_path: Path) -> None:
    fork = server.start(order(1, "wait", tmp_path))
    fork.send(signal.SIGTERM)
    assert ended(fork) == 7


def test_the_end_of_the_server_ends_its_jobs(server: ForkServer, tmp_path: Path) -> None:
    fork = server.start(order(1, "wait", tmp_path))
    pid = appeared(tmp_path / "1")
    os.kill(server.pid, signal.SIGKILL)
    assert ended(fork) == -signal.SIGKILL
    assert wait_until(lambda: not alive(pid))
    assert ended(server.start(order(2, "report", tmp_path, text="the next server"))) == 0


def test_closing_the_pipe_kills_the_jobs(server: ForkServer, tmp_path: Path) -> None:
    server.start(order(1, "wait", tmp_path))
    pid = appeared(tmp_path / "1")
    server._pipe.close()  # as the end of the parent does, however it ends
    assert wait_until(lambda: not alive(pid))


def test_signals_of_a_whole_session_leave_the_server(server: ForkServer, tmp_path: Path) -> None:
    assert ended(server.start(order(1, "report", tmp_path, text="first"))) == 0
    for number in HEARD_SIGNALS:
        os.kill(server.pid, number)
    assert ended(server.start(order(2, "report", tmp_path, text="second"))) == 0


@pytest.mark.slow  # it imports all that a run does
def test_what_is_preloaded_starts_no_thread(tmp_path: Path) -> None:
    warm = ForkServer()
    try:
        assert ended(warm.start(order(1, "report", tmp_path, text="warm"))) == 0
        threads = [file.read_text() for file in Path(f"/proc/{warm.pid}/task").glob("*/comm")]
        # Where pyarrow is installed, pandas imports it: its allocator's thread survives forks.
        assert len([name for name in threads if name != "jemalloc_bg_thd\n"]) == 1, threads
    finally:
        warm.close()


def test_what_is_preloaded_is_there() -> None:
    missing = [name for name in fork_server.PRELOADED if importlib.util.find_spec(name) is None]
    assert missing == []
