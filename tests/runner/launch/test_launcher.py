"""R9: fresh worker processes: how they start and end, none stays behind, and restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.launch import launcher
from tests.helpers import ROOT, alive, python, ran, started, wait_until

PARENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from runner.launch import failures, launcher
from runner.launch.failures import Ended
from runner.launch.group import stops_heard
run_dir = Path(sys.argv[1])
machine = launcher.ThisMachine(2, run_dir, f"tests.runner.jobs:{sys.argv[2]}")
if sys.argv[3:] == ["unsaved"]:
    sys.exit(launcher.run_group(run_dir, 2, run_dir, f"tests.runner.jobs:{sys.argv[2]}").code)
try:
    with stops_heard() as stops:
        ended = machine.attempt(run_dir, stops)
except KeyboardInterrupt:
    ended = Ended(130)
failures.report_end(ended, run_dir, 2)
sys.exit(ended.code)
"""


def group(run_dir: Path, job: str, num_processes: int = 2) -> int:
    return launcher.run_group(run_dir, num_processes, run_dir, f"tests.runner.jobs:{job}").code


def pids(run_dir: Path) -> list[int]:
    """Return the processes that both workers wrote down: themselves and a child each."""
    files = [run_dir / f"pids_{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def none_left(run_dir: Path, within: float = 30.0) -> bool:
    noted = pids(run_dir)
    return len(noted) == 4 and wait_until(lambda: not any(map(alive, noted)), within)


class Parent:
    """A process that launches a job, as a person would."""

    def __init__(self, run_dir: Path, job: str, *more: str) -> None:
        self.run_dir = run_dir
        self.process = started(python("-c", PARENT, str(run_dir), job, *more), ROOT)

    def signal(self, number: int, times: int = 1) -> tuple[int, str, float]:
        """Send a signal when all workers are up; return exit code, output and seconds taken."""
        pids(self.run_dir)
        began = time.monotonic()
        for _ in range(times):
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=300)
        return self.process.returncode, output, time.monotonic() - began


@pytest.fixture
def parents() -> Iterator[list[Parent]]:
    made: list[Parent] = []
    yield made
    for parent in made:
        parent.process.kill()
        parent.process.communicate()


def test_workers_know_their_place_and_rank_zero_has_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "__init__.py").write_text("raise SystemExit('the wrong accel')")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    assert group(tmp_path, "report") == 0
    assert (tmp_path / "seen_0").read_text() == "0 2"
    assert (tmp_path / "seen_1").read_text() == "1 2"
    printed = capfd.readouterr().out
    assert "hello from rank 0 of 2" in printed
    assert "hello from rank 1" not in printed
    log = (tmp_path / "logs" / "rank_1.log").read_text()
    assert "hello from rank 1 of 2" in log
    assert f"accel is {ROOT / 'accel'}" in log
    path = next(line for line in log.splitlines() if line.startswith("path ")).split()
    assert path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("job", "cause", "also", "never"),
    [
        ("second_fails", "ValueError: the second one broke\n", "in second_fails", "worker.py"),
        ("cascade", "ValueError: the cause", "in cascade", "connection closed"),
        (
            "crash",
            "its process was ended by SIGKILL (out of memory?)",
            "the last words of rank 1",
            "connection closed",
        ),
    ],
)
def test_the_first_failure_is_the_cause_and_ends_all(
    job: str, cause: str, also: str, never: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert group(tmp_path, job) == 1
    printed = capfd.readouterr().err
    assert f"rank 1 failed first: {cause}" in printed
    assert printed.count("Traceback") <= 1
    assert also in printed
    assert never not in printed
    assert job == "cascade" or none_left(tmp_path)


def test_a_mistake_found_by_workers_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert group(tmp_path, "refuse") == 2
    printed = capfd.readouterr().err
    assert printed == "model.width=0: it is at least 1. Set model.width=1.\n"


def test_workers_without_a_state_to_save_end_with_the_signal(
    tmp_path: Path, parents: list[Parent]
) -> None:
    """An evaluation under coreutils' `timeout`, which sends SIGTERM twice, went on for good."""
    parents.append(Parent(tmp_path, "wait_for_signal", "unsaved"))
    code, output, _ = parents[0].signal(signal.SIGTERM, times=2)
    assert (code, output) == (128 + signal.SIGTERM, "")
    assert none_left(tmp_path)
    assert not list(tmp_path.glob("saved_*"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_stop_signal_is_handed_on(
    number: signal.Signals, tmp_path: Path, parents: list[Parent]
) -> None:
    parents.append(Parent(tmp_path, "wait_for_signal"))
    code, printed, _ = parents[0].signal(number)
    assert code == 75
    assert (tmp_path / "saved_0").exists()
    assert (tmp_path / "saved_1").exists()
    assert printed == ""
    assert none_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["wait_for_signal", "stay_blocked"])
def test_control_c_ends_everything_soon(job: str, tmp_path: Path, parents: list[Parent]) -> None:
    parents.append(Parent(tmp_path, job))
    code, printed, seconds = parents[0].signal(signal.SIGINT)
    assert code == 130
    assert printed == f"Interrupted before the first checkpoint of {tmp_path}.\n"
    assert seconds < 29  # torch would wait 30
    assert none_left(tmp_path)


def test_importing_the_launcher_costs_no_torch() -> None:
    code = "import sys, runner.launch.launcher, runner.launch.worker; print('torch' in sys.modules)"
    assert ran(python("-c", code), ROOT).stdout == "False\n"
