"""A server of a sweep's processes that trains nothing: jobs end at once, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.recipe.schema import Recipe
from runner.sweep import fork_server, pool
from runner.sweep.devices import Machine
from runner.sweep.fork_server import Event, Order
from runner.sweep.journal import Journal
from runner.sweep.live import Live


@dataclass
class StandIn:
    """Records the orders; job n ends with `codes[n]`, else 0, and `objectives[n]`, else n.

    `statuses` are those of jobs whose status the exit code does not tell.
    """

    codes: dict[int, int] = field(default_factory=dict)
    objectives: dict[int, Any] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    waiting: list[Event] = field(default_factory=list)
    on_start: Callable[[Order], object] = lambda order: None
    sent: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    def start(self, order: Order) -> None:
        self.orders.append(order)
        given: Any = order.arguments
        code, journal = self.codes.get(order.number, 0), Journal(Path(given["folder"]))
        attempt = journal.started(order.number, given["overrides"])
        run_dir = journal.path.parent / f"{order.number:04}"
        run_dir.mkdir(exist_ok=True)
        (run_dir / "sessions").mkdir(exist_ok=True)
        self.on_start(order)
        if code >= 0:
            value = self.objectives.get(order.number, float(order.number)) if code == 0 else None
            values = {"objective": value, "metric": "loss", "mode": "min", "seconds": 1.0}
            values |= {"status": self.statuses.get(order.number)}
            journal.ended(order.number, attempt, given["overrides"], code, **values)
        self.waiting += [Event(order.number, 0), Event(order.number, 0, code)]

    def events(self, seconds: float) -> list[Event]:
        found, self.waiting = self.waiting, []
        return found

    def send(self, event: Event, number: int) -> None:
        self.sent.append((event.number, number))

    def close(self) -> None:
        self.closed = True

    @property
    def recipes(self) -> list[Recipe]:
        return [order.arguments["recipe"] for order in self.orders]  # type: ignore[misc]


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
    return workers.run([pool.Task(n, (f"seed={n}",), lambda: recipe) for n in numbers])
