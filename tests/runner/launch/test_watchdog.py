"""Which rank hangs: the judgement, and the watchdog's threads in two real processes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.errors import ConfigError
from runner.config.schema import Distributed, Recipe, Trainer
from runner.launch import hangs, watchdog
from runner.launch.hangs import Report, judge
from runner.launch.stacks import BUSY, IN_TORCH, WAITING, Place, Stack
from runner.training.progress import Progress
from tests.helpers import run_distributed

LIMIT = 10.0
SITE = "/venv/site-packages"
BACKWARD = (
    Place("/home/me/train.py", 3, "main"),
    Place(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward"),
)
SLEEP = (Place("/home/me/data.py", 12, "__getitem__"),)
LINEAR = (
    Place("/home/me/data.py", 12, "forward"),
    Place(f"{SITE}/torch/nn/modules/linear.py", 9, "forward"),
)
GATHER = (
    Place("/home/me/model.py", 7, "build"),
    Place(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "broadcast"),
)
IMPORT = (
    Place("/home/me/train.py", 3, "main"),
    Place("<frozen importlib._bootstrap>", 1, "_find_and_load"),
    Place(f"{SITE}/torch/distributed/tensor/__init__.py", 1, "<module>"),
)
LOADER = (*SLEEP, Place(f"{SITE}/torch/utils/data/dataloader.py", 1, "_try_get_data"))
COMPILE = (Place(f"{SITE}/torch/_dynamo/convert_frame.py", 1, "_compile"), *LINEAR)


def report(rank: int, places: tuple[Place, ...], **changes: object) -> Report:
    stack = Stack(places, "the stack")
    made = Report(rank, 5, "training", False, LIMIT, None, stack)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        (SLEEP, BUSY),
        (IMPORT, BUSY),
        (LOADER, BUSY),
        (LINEAR, IN_TORCH),
        (BACKWARD, WAITING),
        (GATHER, WAITING),
    ],
)
def test_what_a_thread_does(places: tuple[Place, ...], kind: str) -> None:
    assert Stack(places, "").kind == kind


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_does_not_wait_is_named_with_its_place(culprit: int) -> None:
    reports = {rank: report(rank, SLEEP if rank == culprit else BACKWARD) for rank in (0, 1)}
    verdict = judge(reports, {}, LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.ends) == (culprit, True)
    assert "in training, at /home/me/data.py:12 in __getitem__" in verdict.message
    assert f"rank {1 - culprit} is at /home/me/train.py:3" in verdict.message


def test_of_two_that_wait_the_one_with_fewer_collectives_is_named() -> None:
    reports = {
        0: report(0, BACKWARD, collectives=8),
        1: report(1, BACKWARD, collectives=7),
        2: report(2, LINEAR, collectives=9),
    }
    verdict = judge(reports, {}, LIMIT)
    assert verdict is not None
    assert verdict.rank == 2
    reports[2] = report(2, LINEAR, collectives=6)
    reports[1] = report(1, LINEAR, collectives=5)
    verdict = judge(reports, {}, LIMIT)
    assert verdict is not None
    assert verdict.rank == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    verdict = judge({0: report(0, SLEEP)}, {1: "it does not answer"}, LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.ends, verdict.stack) == (1, True, "")
    assert verdict.message.startswith("it does not answer")


def test_a_run_that_makes_progress_is_left_alone() -> None:
    assert judge({0: report(0, SLEEP, seconds=1.0), 1: report(1, BACKWARD)}, {}, LIMIT) is None


@pytest.mark.parametrize(
    "slow",
    [report(1, SLEEP, is_slow=True, phase="start-up"), report(1, COMPILE)],
    ids=["start-up", "compilation"],
)
def test_a_slow_phase_is_named_and_never_ended(slow: Report) -> None:
    reports = {0: report(0, GATHER), 1: slow}
    verdict = judge(reports, {}, LIMIT, reports)
    assert verdict is not None
    assert (verdict.rank, verdict.ends) == (1, False)


def test_a_deadlock_is_ended_in_any_phase_once_it_is_seen_twice() -> None:
    elsewhere = (Place("/home/me/other.py", 8, "prepare"), GATHER[1])
    reports = {
        0: report(0, GATHER, is_slow=True, phase="start-up"),
        1: report(1, elsewhere, is_slow=True, phase="start-up"),
    }
    first = judge(reports, {}, LIMIT)
    assert first is not None
    assert not first.ends
    moved = {**reports, 1: report(1, GATHER, is_slow=True, phase="start-up")}
    again = judge(reports, {}, LIMIT, moved)
    assert again is not None
    assert not again.ends
    last = judge(reports, {}, LIMIT, reports)
    assert last is not None
    assert last.ends
    assert "every rank waits for another" in last.message


@pytest.mark.parametrize(
    ("ended", "world_size", "named", "what"),
    [
        ({1}, 2, 1, "it ended training"),
        ({0}, 2, 0, "it ended training"),
        ({2}, 4, 2, "it ended training"),
        ({0, 1, 3}, 4, 2, "it did not end training with the others"),
    ],
)
def test_a_rank_that_ends_training_alone_is_named(
    ended: set[int], world_size: int, named: int, what: str
) -> None:
    reports = {
        rank: report(
            rank,
            GATHER if rank in ended else BACKWARD,
            ending="after step 2 (enough)" if rank in ended else "",
            is_slow=rank in ended,
        )
        for rank in range(world_size)
    }
    verdict = judge(reports, {}, LIMIT, reports)
    assert verdict is not None
    assert (verdict.rank, verdict.ends, verdict.stack) == (named, True, "")
    rule = "after step 2 (enough); call loop.stop on every rank at the same step: no progress for"
    assert verdict.message.startswith(f"{what} {rule}")


def test_where_all_have_ended_the_one_that_does_not_wait_is_named() -> None:
    ending = "after step 2 (enough)"
    reports = {0: report(0, GATHER, ending=ending), 1: report(1, SLEEP, ending=ending)}
    verdict = judge(reports, {}, LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.stack) == (1, "the stack")
    assert "ended training" not in verdict.message


def test_a_stack_is_shown_with_the_users_own_lines() -> None:
    found: list[Stack] = []
    list(map(lambda _: found.append(Stack.of_main_thread()), [0]))
    (stack,) = found
    assert f'File "{__file__}"' in stack.text
    assert "_pytest" not in stack.text
    assert any("_pytest" in place.file for place in stack.places)


def test_reports_travel_as_plain_containers() -> None:
    made = report(1, GATHER, collectives=3)
    assert Report.from_plain(made.plain()) == made


# -- the time-out ----------------------------------------------------------------------------------


def test_the_watchdog_comes_before_the_time_out_of_the_group() -> None:
    cpu = Distributed(kind="multi_cpu")
    assert watchdog.limit_of(Recipe(distributed=cpu)) == 1200.0
    assert watchdog.limit_of(Recipe(distributed=cpu, trainer=Trainer(hang_timeout=None))) is None
    assert (
        watchdog.limit_of(Recipe(distributed=cpu, trainer=Trainer(hang_timeout="00:01:00"))) == 60
    )
    short = Distributed(kind="multi_cpu")
    short.init.timeout = watchdog.NCCL_TIMEOUT
    assert watchdog.limit_of(Recipe(distributed=short)) == 540.0
    with pytest.raises(ConfigError, match=r"Trainer\.hang_timeout='soon'"):
        Trainer(hang_timeout="soon")


# -- threads ---------------------------------------------------------------------------------------


def watched(folder: str, limit: float) -> list[tuple[int, str, bool]]:
    """Return this rank's verdicts: rank 1 sleeps until there is one, then both make a step."""
    from accel.env import Environment
    from runner.launch import rendezvous

    rank, verdicts = Environment.read().rank or 0, []
    progress = Progress()
    store = rendezvous.connect("watchdog", watchdog.STORE_TIMEOUT)
    # A connection that waits serves no other thread.
    meet, news = rendezvous.connect("meet"), rendezvous.connect("meet")

    def tell(verdict: hangs.Verdict | None) -> None:
        verdicts.append((-1, "", False) if verdict is None else _short(verdict))
        news.set("told", "1")

    dog = watchdog.Watchdog(progress, limit, rank, 2, Path(folder), store, tell)
    dog.start()
    try:
        if rank == 1:
            sleeping(meet)
            meet.set("awake", "1")
        meet.wait(["awake"], watchdog.NCCL_TIMEOUT)
        progress.step()
        deadline = time.monotonic() + 120
        while verdicts and verdicts[-1][0] >= 0 and time.monotonic() < deadline:
            time.sleep(0.02)  # the judge is about to see the step
    finally:
        dog.close()
    return verdicts


def _short(verdict: hangs.Verdict) -> tuple[int, str, bool]:
    return verdict.rank, verdict.message, verdict.ends


def sleeping(meet: Any) -> None:
    deadline = time.monotonic() + 120
    while not meet.check(["told"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_rank_writes_its_stack_and_one_is_named(tmp_path: Path) -> None:
    answers = run_distributed(watched, 2, str(tmp_path), 0.5)
    (verdicts,) = (answer for answer in answers if answer)
    assert verdicts[-1][0] == -1  # progress was made again
    for rank, message, ends in verdicts[:-1]:
        assert rank in (0, 1)
        assert "no progress for" in message
        assert not ends
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert f"watchdog of rank {rank}: No progress for" in log
        assert "in watched" in log
    assert "in sleeping" in (tmp_path / "logs" / "rank_1.log").read_text()
