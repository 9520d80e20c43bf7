"""S1, S2, R6, C3: a job of a sweep, under any of Hydra's launchers."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.recipe.schema import Recipe
from runner.runs import lock, sessions
from runner.sweep import job
from runner.sweep import sweep as sweeps
from runner.sweep.job import JobFailed, Local, Task
from runner.sweep.live import Live
from tests.helpers import SECONDS
from tests.runner.sweep.stand_ins import StandIn, begin_job, end_job
from tests.runner.sweep.test_sweep import described


@pytest.fixture
def sweep(tmp_path: Path) -> sweeps.Sweep:
    return sweeps.create(str(tmp_path / "sweep"), Recipe(), described(5, 6, 7))


@pytest.fixture
def called(sweep: sweeps.Sweep) -> Task:
    """A task for the first and the last job."""
    here = (os.getpid(), platform.node())
    return Task(str(sweep.path), "config", *here, command=("runner",), numbers=(0, 2))


def with_server(called: Task, server: StandIn) -> Task:
    live = Live(Path(called.folder), 3)
    return replace(called, local=Local(server, live, 1))  # type: ignore[arg-type]


def test_known_jobs_run_with_the_recipe_of_the_description(called: Task) -> None:
    server = StandIn(objectives={2: 2.5})
    found = with_server(called, server).run_here([["seed=5"], ["seed=7"]], 0)
    assert [order.number for order in server.orders] == [0, 2]
    assert [recipe.seed for recipe in server.recipes] == [5, 7]
    assert [one.return_value for one in found] == [0.0, 2.5]


def test_a_sweeper_gets_objectives_and_failures(called: Task) -> None:
    server = StandIn({1: 1, 4: -9}, {0: None, 2: 0.25})
    sampled = replace(with_server(called, server), numbers=None)
    jobs = [["seed=1"], ["seed=2"], ["seed=3"], ["trainer.epochs=-1"], ["seed=4"]]
    found = sampled.run_here(jobs, 0)
    assert found[2].return_value == 0.25
    killed = "^job 0004: its process was ended by SIGKILL"
    for index, text in (
        *((0, "measured none"), (1, "^job 0001: it ended with exit code 1$")),
        *((3, "exit code 2"), (4, killed)),
    ):
        with pytest.raises(JobFailed, match=text):
            _ = found[index].return_value
    assert [order.number for order in server.orders] == [0, 1, 2, 4]


def test_a_stop_ends_the_command(called: Task) -> None:
    server = StandIn({0: 75})
    server.on_start = lambda order: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        with_server(called, server).run_here([["seed=5"], ["seed=7"]], 0)
    assert ended.value.code == 75


# -- in a process of the launcher's --------------------------------------------------------


@pytest.fixture
def hydra(monkeypatch: pytest.MonkeyPatch) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    def of(number: int, *overrides: str) -> None:
        content = {"job": {"num": number}, "overrides": {"task": list(overrides)}}
        monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create(content))

    return of


def test_a_launcher_process_trains_the_recorded_recipe(
    called: Task, hydra: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run(folder: Path, number: int, overrides: Any, name: str, recipe: Recipe, *_: Any) -> int:
        seen.append((number, overrides, recipe.seed))
        return 0

    monkeypatch.setattr(job, "run", lambda *given, fresh: run(*given))
    hydra(1, "++seed=7")
    called(None)  # type: ignore[arg-type]
    assert seen == [(2, ["seed=7"], 7)]


def test_a_stopped_process_begins_no_further_job(
    called: Task, hydra: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []

    def run(folder: Path, number: int, *_: Any, **__: Any) -> int:
        began.append(number)
        os.kill(os.getpid(), signal.SIGTERM)
        return 75

    monkeypatch.setattr(job, "_is_stopped", False)
    monkeypatch.setattr(job, "run", run)
    for index in (0, 1):
        hydra(index, "seed=5")
        assert called(None) is None  # type: ignore[arg-type]
    assert began == [0]
    with pytest.raises(JobFailed):
        replace(called, numbers=None)(None)  # type: ignore[arg-type]


def test_a_stop_is_sent_to_jobs_below_the_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = subprocess.Popen(["sleep", "100"])
    holders = {"0000": below.pid, "0001": os.getppid()}
    for name in holders:
        (tmp_path / name).mkdir()

    def holder(run_dir: Path) -> lock.Holder | None:
        ended = holders[run_dir.name] == below.pid and below.poll() is not None
        return None if ended else lock.Holder(holders[run_dir.name], platform.node())

    monkeypatch.setattr(lock, "holder", holder)
    with job.stops_sent_on(tmp_path) as stops, pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stops.received == [signal.SIGTERM]
    assert below.poll() == -signal.SIGTERM


# -- one try ---------------------------------------------------------------------------------

ENDS: list[Callable[[Path], int]] = []


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call what the test has put into `ENDS` in place of training."""
    ENDS.clear()

    def continue_in(run_dir: Path, *_: Any, **__: Any) -> int:
        return ENDS.pop(0)(begin_job(run_dir.parent, int(run_dir.name)))

    monkeypatch.setattr(job.start_run, "continue_in", continue_in)
    monkeypatch.setattr(job.resumable, "require_same", lambda *_: None)


def done(session: Path) -> int:
    end_job(session, 0.25)
    return 0


def raises(error: BaseException) -> Callable[[Path], int]:
    def end(session: Path) -> int:
        raise error

    return end


def out_of_time(session: Path) -> int:
    sessions.end(session, 75, summary={"stopped": "max_time", "complete": False})
    return 75


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("end", [done, out_of_time])
def test_a_finished_job_is_not_trained_again(end: Callable[[Path], int], tmp_path: Path) -> None:
    errors = [KeyboardInterrupt(), SystemExit(75), SystemExit(0), ValueError("disk on fire")]
    ENDS.extend([*map(raises, errors), end])
    codes = [job.run(tmp_path, 0, ["seed=0"], "config", Recipe(), {}) for _ in range(6)]
    assert codes == [130, 75, 1, 1, 0, 0]
    assert len(list(tmp_path.glob("0000/sessions/*"))) == 5


@pytest.mark.usefixtures("trained")
def test_a_job_that_another_command_trains_is_waited_for(tmp_path: Path) -> None:
    ENDS.append(done)
    (tmp_path / "0000").mkdir()
    given = (tmp_path, 0, ["seed=0"], "config", Recipe(), {})
    with ThreadPoolExecutor(1) as pool:
        with lock.held(tmp_path / "0000"):
            waits = pool.submit(job.run, *given)
            time.sleep(0.5)
            assert len(ENDS) == 1
        assert waits.result(SECONDS) == 0
