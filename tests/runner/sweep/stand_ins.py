"""A server of a sweep's processes that trains nothing: jobs end at once, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.launch import fork_server
from runner.launch.fork_server import Order
from runner.recipe.schema import Recipe
from runner.runs import sessions
from runner.sweep import pool
from runner.sweep.devices import Machine
from runner.sweep.live import Live
from tests.runner.written_runs import session_of, write_run, write_session


@dataclass
class StoodIn:
    """The handle of a job that has ended with a status."""

    server: StandIn
    number: int
    status: int
    pid: int = 1

    def poll(self) -> int | None:
        return self.status

    def send(self, number: int) -> None:
        self.server.sent.append((self.number, number))

    def kill(self) -> None:
        """Nothing is left of it."""


@dataclass
class StandIn:
    """Records the orders; job n ends with `codes[n]`, else 0, and `objectives[n]`, else n."""

    codes: dict[int, int] = field(default_factory=dict)
    objectives: dict[int, Any] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    on_start: Callable[[Order], object] = lambda order: None
    sent: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    def start(self, order: Order) -> StoodIn:
        self.orders.append(order)
        given: Any = order.arguments
        code = self.codes.get(order.number, 0)
        value = self.objectives.get(order.number, float(order.number))
        session = begin_job(Path(given["folder"]), order.number, given["overrides"])
        self.on_start(order)
        if code == 0:
            end_job(session, value)
        elif code > 0:
            sessions.end(session, code)
        return StoodIn(self, order.number, code)

    def wait(self, seconds: float) -> None:
        """Wait for nothing: jobs end at once."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> list[int]:
        """Return the numbers of the orders since the last call."""
        found = [order.number for order in self.orders]
        self.orders.clear()
        return found

    @property
    def recipes(self) -> list[Recipe]:
        return [order.arguments["recipe"] for order in self.orders]  # type: ignore[misc]


def begin_job(folder: Path, number: int, overrides: Sequence[str] = ()) -> Path:
    """Begin the run of a job, or go on with it; return its session."""
    run_dir = folder / f"{number:04}"
    if sessions.of_run(run_dir):
        return write_session(run_dir)
    return session_of(write_run(run_dir, summary=False, overrides=list(overrides)))


def end_job(session: Path, value: float | None, metric: str = "loss", mode: str = "min") -> None:
    """Let the run of a job come to its end with an objective; None: nothing was measured."""
    best = {"metric": metric, "mode": mode, "value": value, "step": 7}
    summary = {"complete": True, "stopped": "max_steps", "step": 9, "seconds": 61.0}
    sessions.end(session, 0, summary={**summary, "best": None if value is None else best})


def installed(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Put a stand-in in the place of the server that commands start."""
    server = StandIn()
    monkeypatch.setattr(fork_server, "ForkServer", lambda: server)
    return server


def run_pool(
    server: Any, folder: Path, numbers: Sequence[int], machine: Machine | None = None
) -> dict[int, int]:
    """Run jobs of the default recipe in a pool; return their exit codes."""
    live = Live(folder, len(numbers), alone=False)
    workers = pool.Pool(server, folder, "config", machine or Machine(2), live)
    recipe = Recipe()
    return workers.run([pool.Job(n, (f"seed={n}",), lambda: recipe) for n in numbers])
