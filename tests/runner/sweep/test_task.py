"""C3, S2: the task that any launcher of Hydra calls with each job."""

from __future__ import annotations

import os
import platform
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.recipe.schema import Recipe
from runner.sweep import attempt, pool, task
from runner.sweep import sweep as sweeps
from runner.sweep.live import Live
from runner.sweep.task import JobFailed, Local, Task
from tests.runner.sweep.stand_ins import StandIn
from tests.runner.sweep.test_sweep import described


@pytest.fixture
def sweep(tmp_path: Path) -> sweeps.Sweep:
    return sweeps.create(str(tmp_path / "sweep"), Recipe(), described(5, 6, 7))


@pytest.fixture
def called(sweep: sweeps.Sweep, tmp_path: Path) -> Task:
    """A task for the first and the last job."""
    control = tmp_path / "control"
    control.mkdir()
    here = (os.getpid(), platform.node())
    return Task(str(sweep.path), str(control), "config", *here, command=("runner",), numbers=(0, 2))


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
    called: Task, hydra: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def run(folder: Path, number: int, overrides: Any, name: str, recipe: Recipe, **_: Any) -> int:
        notes = [path.name for path in Path(called.control).iterdir()]
        seen.append((number, overrides, recipe.seed, notes))
        return 0

    monkeypatch.setattr(attempt, "run", run)
    hydra(1, "++seed=7")
    called(None)  # type: ignore[arg-type]
    assert seen == [(2, ["seed=7"], 7, ["2.pid"])]
    assert not list(Path(called.control).iterdir())


def test_a_stopped_command_starts_no_further_job(called: Task, hydra: Any) -> None:
    (Path(called.control) / task.STOP_FILE).touch()
    hydra(0, "seed=5")
    assert called(None) is None  # type: ignore[arg-type]
    with pytest.raises(JobFailed):
        replace(called, numbers=None)(None)  # type: ignore[arg-type]


def test_a_busy_job_is_waited_for(
    called: Task, hydra: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [attempt.BUSY, attempt.BUSY, 0]
    monkeypatch.setattr(pool, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "run", lambda *_, **__: codes.pop(0))
    hydra(0, "seed=5")
    called(None)  # type: ignore[arg-type]
    assert codes == []


def test_an_interrupt_and_a_stop_have_their_codes(
    called: Task, hydra: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (SystemExit(75), 75), (SystemExit(0), 1)):

        def run(*_: Any, error: BaseException = error, **__: Any) -> int:
            raise error

        monkeypatch.setattr(attempt, "run", run)
        assert called.attempt(0, ["seed=5"]) == code


def test_stops_are_handed_on(called: Task) -> None:
    control = Path(called.control)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        (control / "0.pid").write_text(f"{os.getpid()} another-host")
        with task.stops_forwarded(control):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (control / task.STOP_FILE).exists()
        assert heard == []  # a process of that number on this machine is another one
    finally:
        signal.signal(signal.SIGUSR2, before)
