"""One process of a run: how its end is told, which job it takes, where its handlers are set."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel import env
from accel.errors import ConfigError, MissingPackageError, Problem
from accel.imports import load_attribute
from runner.config.processes import Adopted
from runner.config.schema import Distributed, Recipe
from runner.launch import launcher, rank_logs, worker
from runner.run_dir import outcomes
from runner.run_dir.job import Job
from runner.run_dir.outcomes import Outcome
from tests.helpers import run_distributed

REFUSAL = ConfigError(Problem("optimizer.lr=-1", "it is above 0", "Set optimizer.lr=0.1."))
ALONE = {"RANK": None, "WORLD_SIZE": None, "SLURM_STEP_NUM_TASKS": None, "OMP_NUM_THREADS": None}


def raising(error: BaseException) -> Callable[..., int]:
    def run(*args: object) -> int:
        raise error

    return run


# -- endings -------------------------------------------------------------------------------


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
    (kept,) = (tmp_path / "logs").glob("*_rank_0.json")
    assert "second line" in json.loads(kept.read_text())["traceback"]


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


@pytest.mark.parametrize("code", [0, 75])
def test_the_code_of_a_run_is_handed_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "run", lambda run_dir: code)
    assert launcher.run_here(tmp_path) == code


def test_outcomes_are_read_earliest_first_and_of_one_launch(tmp_path: Path) -> None:
    Outcome(0, 5.0, 1, "later").write(tmp_path, "a")
    Outcome(1, 4.0, 1, "earlier").write(tmp_path, "a")
    Outcome(0, 1.0, 1, "another launch").write(tmp_path, "b")
    assert [found.message for found in outcomes.read_outcomes(tmp_path, "a")] == [
        "earlier",
        "later",
    ]


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


# -- where a job runs ----------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what `launch` decided to do."""
    calls: list[Any] = []
    monkeypatch.setattr(launcher, "run_here", lambda *args: calls.append(("here", *args)) or 0)
    monkeypatch.setattr(launcher, "run_group", lambda *args: calls.append(("group", *args)) or 0)
    return calls


@pytest.mark.parametrize(
    ("distributed", "fresh", "where"),
    [
        (Distributed(), False, "here"),
        (Distributed(), True, "group"),
        (Distributed(kind="multi_cpu", num_processes=1), False, "here"),
        (Distributed(kind="multi_cpu"), False, "group"),
    ],
)
def test_one_process_stays_here(
    distributed: Distributed, fresh: bool, where: str, tmp_path: Path, chosen: list[Any]
) -> None:
    with env.patched(**ALONE):
        code = launcher.launch(Job(tmp_path), Recipe(distributed=distributed), fresh=fresh)
    assert code == 0
    assert [call[0] for call in chosen] == [where]
    assert (tmp_path / "threads.json").exists()


def adopt(folder: str) -> tuple[str, int]:
    """Hand the run directory from rank 0 to rank 1, then form a process group as usual."""
    import torch.distributed as dist

    from runner.config import processes
    from runner.launch import rendezvous

    place = processes.adopted()
    assert isinstance(place, Adopted)
    if place.rank == 0:
        rendezvous.publish(Path(folder))
        received = Path(folder)
    else:
        received = rendezvous.receive()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return str(received), size


def test_other_ranks_of_torchrun_receive_the_run_directory(tmp_path: Path) -> None:
    assert run_distributed(adopt, 2, str(tmp_path)) == [(str(tmp_path), 2)] * 2


# -- inside a process ----------------------------------------------------------------------


def test_a_target_is_named_by_module_and_function() -> None:
    assert load_attribute(launcher.TRAIN) is worker.run


def test_handlers_are_set_for_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def train(job: Job, recipe: Recipe, stop: object) -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(worker, "_train", train)
    monkeypatch.setattr(Job, "load", lambda run_dir: (Job(tmp_path), Recipe()))
    assert worker.run(tmp_path) == 0
    assert seen[0] != before
    assert signal.getsignal(signal.SIGTERM) == before
