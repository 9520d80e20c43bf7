"""R3: a signal sets a flag, and all ranks act on it at the same boundary."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from runner.training import stopping
from runner.training.stopping import Progress, StopFlag
from tests.helpers import run_distributed


@dataclass
class Processes:
    """What the flag needs of an accelerator."""

    num_processes: int = 1
    process_index: int = 0


def connect() -> Processes:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return Processes(dist.get_world_size(), dist.get_rank())


def leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopFlag().installed() as stop:
        assert not stop._requested
        assert not stop.agreed(Processes())
        os.kill(os.getpid(), number)
        assert stop._requested
        assert stop.reason == ""
        assert stop.agreed(Processes())
        assert stop.reason == number.name
    assert signal.getsignal(number) == before


def test_the_first_request_stays_unless_time_was_up() -> None:
    stop = StopFlag()
    for asked, reason in (("max_time", "max_time"), ("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGTERM")):
        stop.request(asked)
        assert stop.agreed(Processes())
        assert stop.reason == reason


def test_a_handler_that_was_there_is_called_as_well() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopFlag().installed() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop._requested
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


class Lost:
    """Destroying this takes long enough to be interrupted."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_c_that_was_lost_in_a_destructor_is_raised_at_the_next_boundary() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopFlag().installed() as stop:
            lost: Lost | None = Lost()
            assert lost is not None
            lost = None
            with pytest.raises(KeyboardInterrupt):
                stop.agreed(Processes())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def sleep_on(ready: Any) -> None:
    ready.set()
    time.sleep(120)


def test_a_forked_child_outlasts_sigusr1_and_can_be_terminated() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with StopFlag().installed() as stop:
        child = context.Process(target=sleep_on, args=(ready,))
        child.start()
        assert ready.wait(30)
        os.kill(child.pid or 0, signal.SIGUSR1)
        child.join(0.3)
        assert child.is_alive()
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
        assert not stop._requested


def stops_at(asked: int, at: int, limit: int) -> tuple[int, int, str]:
    """Return (boundary at which this process stopped, decisions exchanged, reason)."""
    import torch.distributed as dist

    processes, stop = connect(), StopFlag()
    exchanged = 0
    exchange = stop._exchange

    def counted(*args: object) -> None:
        nonlocal exchanged
        exchanged += 1
        exchange(*args)  # type: ignore[arg-type]

    stop._exchange = counted  # type: ignore[method-assign]
    boundary = 0
    stopping.INTERVAL_SECONDS, before = (
        3600.0,
        stopping.INTERVAL_SECONDS,
    )  # at any pace: the longest
    try:
        for boundary in range(1, limit + 1):
            if boundary == at and processes.process_index == asked:
                stop.request("SIGTERM")
            if stop.agreed(processes):
                break
            dist.barrier()  # in place of the step
    finally:
        stopping.INTERVAL_SECONDS = before
    assert stop.agreed(processes) == bool(stop.reason)
    leave()
    return boundary, exchanged, stop.reason


@pytest.mark.parametrize("asked", [0, 1])
def test_all_processes_stop_at_the_same_boundary(asked: int) -> None:
    answers = run_distributed(stops_at, 2, asked, 500, 2000)
    assert answers[0] == answers[1]
    boundary, exchanged, reason = answers[0]
    # Another rank's request reaches rank 0 at one exchange and is decided at that or the next.
    assert 500 <= boundary <= 500 + 3 * stopping.MAX_INTERVAL
    assert reason == "SIGTERM"
    assert exchanged < 50


def phases() -> list[str]:
    """Return where a process stops that is asked in the middle of an evaluation."""
    import torch.distributed as dist

    processes, stop = connect(), StopFlag()
    seen = []
    for step in range(200):
        if stop.agreed(processes):
            seen.append(f"train {step}")
            break
        for batch in range(4):
            if step == 20 and batch == 1 and processes.process_index == 1:
                stop.request("SIGUSR1")
            if stop.agreed(processes, "evaluation"):
                seen.append(f"evaluation {step} {batch}")
                break
            dist.barrier()  # in place of the batch: else rank 0 may be past the end by now
    leave()
    return seen


def test_evaluation_counts_its_own_boundaries() -> None:
    answers = run_distributed(phases, 2)
    assert answers[0] == answers[1]
    assert answers[0]


def test_a_phase_ends_where_it_began_also_after_an_error() -> None:
    progress = Progress()
    assert not progress.is_timed
    progress.step()
    with progress.in_phase("evaluation"):
        with pytest.raises(ValueError, match="within"), progress.in_phase("saving"):
            raise ValueError("within")
        assert progress.phase == "evaluation"
    assert (progress.phase, progress.is_timed, progress.count) == ("training", True, 5)
