"""The agent of a group of workers, at the moments that whole launches meet by chance alone."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from accel import env
from runner.launch.worker_group import GroupAgent, agent_handlers_restored
from runner.training.stopping import TORCHS_SIGNALS


class Process:
    """A worker that runs until `code` is set; notes the signals that it gets."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout: float | None = None) -> int:
        self.code = self.code or -signal.SIGINT
        return self.code


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> GroupAgent:
    monkeypatch.setattr(LocalElasticAgent, "__init__", lambda self, spec, logs_specs: None)
    made: Any = GroupAgent
    return made(None, None)  # type: ignore[no-any-return]


def start(agent: GroupAgent, monkeypatch: pytest.MonkeyPatch, early: tuple[int, ...]) -> list[Any]:
    """Start two workers, with signals that another thread takes while they are being started."""
    processes = [Process(), Process()]

    def started(self: Any, worker_group: Any) -> dict[int, int]:
        taken = env.copy()[TORCHS_SIGNALS].split(",")
        assert not {"SIGTERM", "SIGUSR1", "SIGINT"} & set(taken)
        for number in early:
            self._forward(number, None)
        handlers = {rank: SimpleNamespace(proc=processes[rank]) for rank in (0, 1)}
        self._pcontext = SimpleNamespace(subprocess_handlers=handlers)
        return {0: 10, 1: 11}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", started)
    with agent_handlers_restored():
        agent.take_signals()
        assert agent._start_workers(None) == {0: 10, 1: 11}  # type: ignore[arg-type]
        agent._forward(signal.SIGUSR1, None)
    return processes


def statuses(agent: GroupAgent) -> dict[int, int]:
    """Return the exit status of each rank that failed."""
    return {rank: failure.status for rank, failure in agent.failed.items()}


def test_a_signal_from_before_the_workers_reaches_them(
    agent: GroupAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in start(agent, monkeypatch, (signal.SIGTERM,)):
        assert process.signals == [signal.SIGTERM, signal.SIGUSR1]


def test_torch_is_asked_only_once_an_end_is_seen(
    agent: GroupAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(agent, monkeypatch, ())
    asked = []
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *args: asked.append(args))
    watch: Any = agent._monitor_workers
    assert watch(None).state == WorkerState.HEALTHY
    first.code = 0
    assert watch(None).state == WorkerState.HEALTHY
    assert not asked
    second.code = -signal.SIGKILL
    watch(None)
    assert len(asked) == 1
    assert statuses(agent) == {1: -signal.SIGKILL}


def test_workers_that_are_left_are_interrupted(
    agent: GroupAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(agent, monkeypatch, ())
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *args: None)
    second.code = 1
    agent._monitor_workers(None)  # type: ignore[arg-type]
    assert first.signals[-1] == signal.SIGINT
    assert statuses(agent) == {1: 1}


def test_an_exit_with_0_of_a_rank_that_is_not_finished_is_a_failure(
    agent: GroupAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(agent, monkeypatch, ())
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *args: None)
    agent._finished = lambda rank: rank == 0
    watch: Any = agent._monitor_workers
    first.code = 0
    watch(None)
    assert statuses(agent) == {}
    second.code = 0
    watch(None)
    assert statuses(agent) == {1: 0}
