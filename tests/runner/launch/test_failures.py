"""R9: the first cause of a failure, from what processes have left, and how it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError, MissingPackageError, Problem
from runner.exit_codes import FAILED
from runner.launch import failures, launcher, rank_logs, worker
from runner.launch.failures import Ended
from runner.launch.group import Failure
from runner.recipe.processes import Adopted
from runner.runs import outcomes
from runner.runs.json_files import read_json
from runner.runs.outcomes import Outcome

REFUSAL = ConfigError(Problem("optimizer.lr=-1", "it is above 0", "Set optimizer.lr=0.1."))


def raising(error: BaseException) -> Callable[..., int]:
    def run(*args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize("error", [REFUSAL, MissingPackageError("wandb", "tracker.log_with=wandb")])
def test_a_mistake_is_refused_without_a_traceback(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker, "run", raising(error))
    assert launcher.run_here(tmp_path) == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_an_error_shows_its_own_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run", raising(ValueError("wrong shape\nsecond line")))
    (tmp_path / "metrics.jsonl").touch()  # a step was made
    assert launcher.run_here(tmp_path) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "launch.py" not in printed
    assert "the run failed: ValueError: wrong shape\n" in printed
    assert str(tmp_path) in printed
    (kept,) = outcomes.read_outcomes(tmp_path)
    assert "second line" in kept.traceback
    assert read_json(tmp_path / "ended.json")["cause"]["message"] == kept.message


def test_control_c_tells_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run", raising(KeyboardInterrupt()))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    assert launcher.run_here(run_dir) == 130
    assert capsys.readouterr().err.startswith("Interrupted before the first checkpoint")
    (run_dir / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    assert launcher.run_here(run_dir) == 130
    assert capsys.readouterr().err.endswith(f"runner resume='{run_dir}'\n")


# -- the first cause ------------------------------------------------------------------------------


def test_ends_without_a_failure() -> None:
    done, stopped = Outcome(0, 1.0, 0, ""), Outcome(1, 1.0, 75, "SIGTERM")
    assert failures.conclude([done]) == Ended(0)
    assert failures.conclude([done, stopped]) == Ended(75)


def test_a_lost_node_is_the_cause_of_errors_of_communication() -> None:
    broken = Outcome(0, 1.0, 1, "Connection reset by peer", is_consequence=True)
    lost = Outcome(1, 2.0, 1, "node b (rank 1) is lost: its connection was closed")
    assert failures.conclude([broken, lost]) == Ended(1, lost)


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
    (found,) = failures.outcomes_of(tmp_path, {3: Failure(status, 5.0)})
    assert (found.code, found.rank, found.message) == (code, 3, message)


@pytest.mark.parametrize("before", ["", "--- rank 3\n"])
def test_a_process_whose_interpreter_hung_is_described_so(before: str, tmp_path: Path) -> None:
    log = rank_logs.log_file(tmp_path, 3)
    log.write_text(f"{before}Timeout (0:20:00)!\nThread 0x1 (most recent call first):\n")
    (found,) = failures.outcomes_of(tmp_path, {3: Failure(1, 5.0)})
    assert found.message == "it hangs: native code keeps the interpreter"
    assert "Timeout (0:20:00)!" in found.traceback


def test_a_hang_is_the_cause_of_what_its_ranks_have_ended_with(tmp_path: Path) -> None:
    hang = Outcome(1, 3.0, 1, "it hangs: no progress for 8 s")
    hang.write(tmp_path)
    failed = {rank: Failure(1, 2.0) for rank in (0, 1)}
    assert failures.conclude(failures.outcomes_of(tmp_path, failed)) == Ended(1, hang)


def test_a_rank_that_has_failed_ends_with_its_code_whatever_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def fail(*given: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)  # srun's: another rank has ended
        return FAILED

    def end(code: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        codes.append(code)

    monkeypatch.setattr(launcher, "run_here", fail)
    monkeypatch.setattr(worker, "end_process", end)
    launcher.run_adopted(tmp_path, Adopted(1, 0, 2, 1))
    assert codes == [FAILED]


# -- where a job runs ----------------------------------------------------------------------


# -- inside a process ----------------------------------------------------------------------


# -- logs ------------------------------------------------------------------------------------------


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    assert rank_logs.tail(log) == []
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert rank_logs.tail(log, 2) == ["line 98", "line 99"]
    log.write_text("before\nFatal Python error: Aborted\n\nstack\nExtension modules: many\n")
    assert rank_logs.tail(log, 3) == ["Fatal Python error: Aborted", "", "stack"]


def _frame(file: str, line: int, name: str) -> str:
    return f'  File "{file}", line {line} in {name}'


def test_a_crash_is_told_with_the_users_frames_of_its_thread(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    others = [f"Thread 0x{n} (most recent call first):\n{_frame('t.py', n, 'f')}\n" for n in (1, 2)]
    mine, inner = _frame("/home/me/data.py", 3, "losses"), _frame(worker.__file__, 9, "run")
    head = "Fatal Python error: Aborted"
    report = [head, "", *others, "Current thread 0x3 (most recent call first):", inner, mine, inner]
    log.write_text("\n".join([*report, "", "Extension modules: many", ""]))
    assert rank_logs.crash(log) == [head, "Current thread 0x3 (most recent call first):", mine]
    assert rank_logs.tail(log, 1) == rank_logs.crash(log)
    log.write_text("\n".join([*report[:-3], inner, inner, "", mine]))
    assert rank_logs.crash(log)[2:] == [inner, inner]


def test_a_crash_of_an_earlier_process_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    log.write_text("--- rank 1, process 2, …\nFatal Python error: Aborted\n\nstack\n")
    assert rank_logs.crash(log)
    with log.open("a") as file:
        file.write("--- rank 1, process 3, …\nthe last words\n")
    assert rank_logs.crash(log) == []
    assert rank_logs.tail(log)[-1] == "the last words"
    assert "stack" not in rank_logs.tail(log)
