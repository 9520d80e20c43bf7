"""R9: which rank hangs, judged from the stacks of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.launch.hangs import (
    BUSY,
    IN_TORCH,
    SLOW_LIMITS,
    WAITING,
    Place,
    Report,
    Stack,
    judge,
)

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


COMPILE = (Place(f"{SITE}/torch/_dynamo/convert_frame.py", 1, "_compile"), *LINEAR)


def report(rank: int, places: tuple[Place, ...], **changes: object) -> Report:
    stack = Stack(places, "the stack")
    made = Report(rank, 5, "training", False, LIMIT, None, stack)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_does_not_wait_is_named_with_its_place(culprit: int) -> None:
    reports = {rank: report(rank, SLEEP if rank == culprit else BACKWARD) for rank in (0, 1)}
    verdict = judge(reports, {}, LIMIT, {})
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
    verdict = judge(reports, {}, LIMIT, {})
    assert verdict is not None
    assert verdict.rank == 2
    reports[2] = report(2, LINEAR, collectives=6)
    reports[1] = report(1, LINEAR, collectives=5)
    verdict = judge(reports, {}, LIMIT, {})
    assert verdict is not None
    assert verdict.rank == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    verdict = judge({0: report(0, SLEEP)}, {1: "it does not answer"}, LIMIT, {})
    assert verdict is not None
    assert (verdict.rank, verdict.ends, verdict.stack) == (1, True, "")
    assert verdict.message.startswith("it does not answer")


def test_a_run_that_makes_progress_is_left_alone() -> None:
    assert judge({0: report(0, SLEEP, seconds=1.0), 1: report(1, BACKWARD)}, {}, LIMIT, {}) is None


def test_a_rank_is_named_though_another_moved_when_it_was_asked_first() -> None:
    first = {0: report(0, SLEEP, is_slow=True), 1: report(1, BACKWARD, seconds=LIMIT / 3)}
    second = {**first, 1: report(1, BACKWARD)}
    assert judge(first, {}, LIMIT, {}) is None
    for before, is_new in ((first, True), (second, False)):
        verdict = judge(second, {}, LIMIT, before)
        assert verdict is not None
        assert (verdict.rank, verdict.ends, verdict.is_new) == (0, False, is_new)


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


@pytest.mark.parametrize("phase", ["start-up", "evaluation"])
def test_a_process_that_is_stopped_ends_the_run_in_any_phase(phase: str) -> None:
    reports = {0: report(0, GATHER, is_slow=True, phase=phase)}
    silent = {1: "it has not started", 2: "its process 7 does not answer: it is stopped"}
    named = judge(reports, silent, LIMIT, {})
    assert named is not None
    assert (named.rank, named.ends) == (1, False)
    verdict = judge(reports, silent, LIMIT, {}, dead={2})
    assert verdict is not None
    assert (verdict.rank, verdict.ends) == (2, True)
    assert "it is stopped" in verdict.message


@pytest.mark.parametrize("phase", ["start-up", "evaluation"])
@pytest.mark.parametrize("silent", [{}, {1: "it has not started"}], ids=["answers", "silent"])
def test_a_slow_phase_is_ended_after_several_limits(silent: dict[int, str], phase: str) -> None:
    for limits in (1, SLOW_LIMITS):
        slow: dict[str, Any] = {"is_slow": True, "phase": phase, "seconds": limits * LIMIT}
        reports = {0: report(0, GATHER, **slow)}
        reports |= {} if silent else {1: report(1, SLEEP, **slow)}
        verdict = judge(reports, silent, LIMIT, {})
        assert verdict is not None
        assert (verdict.rank, verdict.ends) == (1, limits == SLOW_LIMITS)


def test_a_process_that_is_alone_waits_for_no_other_rank() -> None:
    verdict = judge({0: report(0, BACKWARD)}, {}, LIMIT, {})
    assert verdict is not None
    assert verdict.message.startswith("no progress for 10 s in training, at /home/me/train.py:3")
    assert verdict.ends


def test_a_deadlock_is_ended_in_any_phase_once_it_is_seen_twice() -> None:
    elsewhere = (Place("/home/me/other.py", 8, "prepare"), GATHER[1])
    reports = {
        0: report(0, GATHER, is_slow=True, phase="start-up"),
        1: report(1, elsewhere, is_slow=True, phase="start-up"),
    }
    first = judge(reports, {}, LIMIT, {})
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
    verdict = judge(reports, {}, LIMIT, {})
    assert verdict is not None
    assert (verdict.rank, verdict.stack) == (1, "the stack")
    assert "ended training" not in verdict.message


IMPORT = (
    Place("/home/me/train.py", 3, "main"),
    Place("<frozen importlib._bootstrap>", 1, "_find_and_load"),
    Place(f"{SITE}/torch/distributed/tensor/__init__.py", 1, "<module>"),
)
LOADER = (*SLEEP, Place(f"{SITE}/torch/utils/data/dataloader.py", 1, "_try_get_data"))


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


def test_a_stack_is_shown_with_the_users_own_lines() -> None:
    found: list[Stack] = []
    list(map(lambda _: found.append(Stack.of_main_thread()), [0]))
    (stack,) = found
    assert f'File "{__file__}"' in stack.text
    assert "_pytest" not in stack.text
    assert any("_pytest" in place.file for place in stack.places)
